"""Which device a process of ours computes on."""

from __future__ import annotations

import torch

from penstock.messages.errors import UserFault
from penstock.messages.texts import counted


def choose_device(name: str, key: str) -> torch.device:
    """The device that this key of a scenario names; ``auto`` is the first GPU that this process may see, or the CPU.

    Raises:
        UserFault: it is neither a CPU nor a CUDA device that this process may see.
    """
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda:0" if num_gpus else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise UserFault(f"{key}: must be auto, cpu, cuda or cuda:N; found {name!r}")
    if int(index or 0) >= num_gpus:
        raise UserFault(
            f"{key}: {name} was asked for, and this process may see {counted(num_gpus, 'GPU')}; use auto or cpu"
        )
    return torch.device("cuda", int(index or 0))
