"""What the ranks of a learner say to each other while a checkpoint is written, beside training.

Invariants:

* It has a process group of its own, so that nothing of it comes between the collectives of a training step. Ranks make
  it at the same point of their lives.
* What is done together succeeds on every rank or raises the same error on every rank.

| wait | who ends it |
|---|---|
| for the others, in ``each`` and ``first``; and while whole tensors are gathered in its group | they, when their disk is done; a rank that dies, by an error at once; at the latest ``TIMEOUT_S`` |
"""  # noqa: E501

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar, cast

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from penstock.backends.learners.worker_group.workers import WorkerGroup

T = TypeVar("T")

TIMEOUT_S: Final = 1800.0
"""How long one rank may take for its part of a checkpoint: what a slow disk needs for a large one."""


class CheckpointChannel:
    """One rank's end."""

    def __init__(self, workers: WorkerGroup) -> None:
        """On every rank of the worker group, or on none."""
        self.rank = workers.rank
        self.num_ranks = workers.num_ranks
        self.group = None if workers.is_alone else _new_group()
        """None in a worker group of one."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do it on every rank; the results of all, by rank.

        Raises:
            UserFault: a disk, or what was written before, did not let a rank do it.
        """
        result, error = None, ""
        try:
            result = work()
        except (OSError, SafetensorError, UserFault, CheckpointException) as raised:
            error = self._story(raised)
            if self.group is None:
                raise UserFault(error) from raised
        if self.group is None:
            return [cast("T", result)]
        found: list[tuple[T, str]] = [cast("tuple[T, str]", None)] * self.num_ranks
        dist.all_gather_object(found, (result, error), group=self.group)
        refused = [(rank, error) for rank, (_, error) in enumerate(found) if error]
        if refused:
            rank, error = refused[0]
            raise UserFault(error if error.startswith("rank ") else f"rank {rank}: {error}")
        return [result for result, _ in found]

    def first(self, work: Callable[[], T]) -> T:
        """Do it on the first rank alone; its result on every rank.

        Raises:
            UserFault: as for :meth:`each`.
        """
        return cast("T", self.each(lambda: work() if self.is_first else None)[0])

    def _story(self, error: BaseException) -> str:
        """Of torch's collection of what ranks say the first one, without its stack."""
        if isinstance(error, CheckpointException):
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            return str(cause) if self.group is None else f"rank {rank}: {cause}"
        return str(error)


def _new_group() -> ProcessGroup:
    return cast("ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))
