"""Which device a rank of a learner trains on."""

from __future__ import annotations

import torch

from penstock.messages.errors import UserFault
from penstock.messages.texts import counted


def choose_rank_device(name: str, *, local_rank: int, num_local_ranks: int) -> torch.device:
    """The device of one of several ranks: a GPU for each, in order, or the CPU for all.

    Raises:
        UserFault: the device cannot be divided, or there are not enough GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise UserFault(f"learner.device: expected auto, cpu or cuda with several ranks, got {name!r}")
    if num_gpus < num_local_ranks:
        raise UserFault(
            f"learner.num_ranks: {num_local_ranks} ranks run here and may see "
            f"{counted(num_gpus, 'GPU')}; every rank needs one of "
            "its own. Reduce learner.num_ranks, give the learner more GPUs, or set learner.device: cpu"
        )
    return torch.device("cuda", local_rank)
