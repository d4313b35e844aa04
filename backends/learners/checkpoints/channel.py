"""What the ranks of a learner say to each other while a checkpoint is written, beside training.

Invariants:

* It has a process group of its own, so that nothing of it comes between the collectives of a training step. Ranks make
  it at the same point of their lives.
* What is done together succeeds on every rank or raises the same error on every rank.
* A whole tensor is put together on the first rank alone, from host memory, one at a time: the others send a part when
  the first rank takes it.

| wait | who ends it |
|---|---|
| for the others, in ``each``, ``first`` and ``whole_tensors`` | they, when their disk is done; a rank that dies, by an error at once; at the latest ``TIMEOUT_S`` |
"""  # noqa: E501

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from penstock.backends.learners.gang.gang import Gang
    from penstock.backends.learners.torch.shards import Shard

T = TypeVar("T")

TIMEOUT_S: Final = 1800.0
"""How long one rank may take for its part of a checkpoint: what a slow disk needs for a large one."""


class WriteRefusedError(ValueError):
    """A rank could not do its part; the message is the same on every rank."""


class _Part(NamedTuple):
    """Where a rank's part of a tensor lies."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class CheckpointChannel:
    """One rank's end."""

    def __init__(self, gang: Gang) -> None:
        """On every rank of the gang, or on none."""
        self.rank = gang.rank
        self.num_ranks = gang.num_ranks
        self.group = None if gang.is_alone else _new_group()
        """None in a gang of one."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do it on every rank; the results of all, by rank.

        Raises:
            WriteRefusedError: a disk, or what was written before, did not let a rank do it.
        """
        result, error = None, ""
        try:
            result = work()
        except (OSError, SafetensorError, ValueError, CheckpointException) as raised:
            error = self._story(raised)
            if self.group is None:
                raise WriteRefusedError(error) from raised
        if self.group is None:
            return [cast("T", result)]
        found: list[tuple[T, str]] = [cast("tuple[T, str]", None)] * self.num_ranks
        dist.all_gather_object(found, (result, error), group=self.group)
        refused = [(rank, error) for rank, (_, error) in enumerate(found) if error]
        if refused:
            rank, error = refused[0]
            raise WriteRefusedError(error if error.startswith("rank ") else f"rank {rank}: {error}")
        return [result for result, _ in found]

    def first(self, work: Callable[[], T]) -> T:
        """Do it on the first rank alone; its result on every rank.

        Raises:
            WriteRefusedError: as for :meth:`each`.
        """
        return cast("T", self.each(lambda: work() if self.is_first else None)[0])

    def whole_tensors(self, shards: Mapping[str, Shard]) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor on the host, in this order, on the first rank; nothing on the others, which send.

        The first rank has to go through to the end: the others wait for it.
        """
        if self.group is None:
            for name, shard in shards.items():
                yield name, shard.local.to("cpu")
            return
        mine = [_Part(shard.offset, tuple(shard.local.shape)) for shard in shards.values()]
        parts: list[list[_Part]] = [mine] * self.num_ranks
        dist.all_gather_object(parts, mine, group=self.group)
        for index, (name, shard) in enumerate(shards.items()):
            owners = _owners([parts[rank][index] for rank in range(self.num_ranks)])
            if not self.is_first:
                if self.rank in owners:
                    dist.send(_bytes_of(shard.local.to("cpu").contiguous()), dst=0, group=self.group)
                continue
            if shard.is_whole:
                yield name, shard.local.to("cpu")
                continue
            yield name, self._joined(shard, owners)

    def _story(self, error: BaseException) -> str:
        """Of torch's collection of what ranks say the first one, without its stack."""
        if isinstance(error, CheckpointException):
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            return str(cause) if self.group is None else f"rank {rank}: {cause}"
        return str(error)

    def _joined(self, shard: Shard, owners: Mapping[int, _Part]) -> Tensor:
        whole = torch.empty(shard.shape, dtype=shard.local.dtype)
        for rank, part in owners.items():
            places = tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape, strict=True))
            if rank == 0:
                whole[places] = shard.local.to("cpu")
            else:
                received = torch.empty(part.shape, dtype=whole.dtype)
                dist.recv(_bytes_of(received), src=rank, group=self.group)
                whole[places] = received
        return whole


def _new_group() -> ProcessGroup:
    return cast("ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))


def _owners(parts: list[_Part]) -> dict[int, _Part]:
    """The lowest rank that has each part; all ranks find the same."""
    seen: set[_Part] = set()
    owners: dict[int, _Part] = {}
    for rank, part in enumerate(parts):
        if part not in seen and all(part.shape):
            seen.add(part)
            owners[rank] = part
    return owners


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; not every dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)
