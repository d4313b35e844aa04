"""Ranks compare what a hook returned on each of them: one that draws random numbers, or goes through a set in whatever
order, would have each rank train another model, and nobody would see it.

| wait | who ends it |
|---|---|
| for what the other ranks have | they do; at the latest the timeout of the worker group |
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from penstock.backends.processes.user_code import UserCodeError

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.worker_group.workers import WorkerGroup

TOLERANCE: Final = 1e-5
"""Of the sum of magnitudes: a GPU adds up in an order of its own."""


def check_agreement(workers: WorkerGroup, values: Tensor, what: str) -> None:
    """Called on every rank alike.

    Args:
        workers: all ranks.
        values: that are to be the same on all of them ``[N]``.
        what: they are, for the message, with the key of the hook.

    Raises:
        UserCodeError: they differ; on every rank.
    """
    if workers.is_alone:
        return
    marks = _marks(values)
    bounds = torch.cat([marks, -marks])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=workers.control)
    highest, lowest = bounds[: len(marks)], -bounds[len(marks) :]
    if bool((highest - lowest > TOLERANCE * highest[1].abs()).any()):
        raise UserCodeError(
            f"{what} differ between the {workers.num_ranks} ranks of the learner, which would train different models; "
            "make the function depend on what it is given alone: no random numbers but those of a generator that is "
            "seeded with given.version, no order of a set, no clock"
        )


def _marks(values: Tensor) -> Tensor:
    """Few numbers that tell one vector from another: length, magnitude, sum, and one that knows the order."""
    found = values.detach().double().cpu()
    places = torch.arange(len(found), dtype=torch.float64)
    length = torch.tensor(float(len(found)), dtype=torch.float64)
    return torch.stack([length, found.abs().sum(), found.sum(), (found * places.cos()).sum()])
