"""What a rank holds of a tensor that is divided over ranks: its part, and where that lies in the whole.

Invariants:

* Parts that begin at the same place are the same part: copies of each other on several ranks.
* The parts of all ranks together are the whole tensor.
* A tensor that is not divided is one part, which is the whole.
* A divided one is divided by rows (its first dimension), over one dimension of the mesh: parts lie in the order of the
  ranks, as many rows each as ``torch.chunk`` gives, so the last ones may be smaller or empty.
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from penstock.backends.weights.pages import fresh_copy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    from penstock.backends.device_memory import ParkedMemory
    from penstock.backends.learners.checkpoints.channel import CheckpointChannel


class Shard(NamedTuple):
    """One rank's part of a tensor."""

    local: Tensor
    """An ordinary tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins, in each dimension."""
    num_parts: int | None = None
    """So many ranks, from the first on, have all parts, and others copies of them; None: each rank has its own."""

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing beside this part."""
        return tuple(self.local.shape) == self.shape


@torch.no_grad()
def shard_of(tensor: Tensor) -> Shard:
    """This rank's part, not copied."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
    assert tensor.placements == (Sharded(0),), "divided by rows"
    rows = rows_of(tensor.shape[0], tensor.device_mesh.size(), tensor.device_mesh.get_local_rank())
    offset = (rows.start, *(0 for _ in tensor.shape[1:]))
    local = cast("DTensor", tensor.detach()).to_local()
    return Shard(local, tuple(tensor.shape), offset, tensor.device_mesh.size())


def rows_of(num_rows: int, num_ranks: int, rank: int) -> range:
    """The rows of a divided tensor that a rank has."""
    size, start = Sharded.local_shard_size_and_offset(num_rows, num_ranks, rank)
    return range(start, start + size)


class RowGather:
    """Brings tensors together on the first rank, each part straight to its place in the whole; every rank adds the same
    tensors in the same order.

    | wait | who ends it |
    |---|---|
    | ``arrived``, until the parts were sent and received | the other ranks; at the latest the group's timeout |
    """

    def __init__(self, rank: int, num_ranks: int, group: ProcessGroup | None = None) -> None:
        """``group`` is what parts are sent in, of ``num_ranks`` ranks; None is torch's default."""
        self._rank, self._num_ranks, self._group = rank, num_ranks, group
        self._whole: deque[tuple[str, Tensor]] = deque()
        self._parts: list[dist.P2POp] = []
        self._works: list[Work] = []

    def add(self, name: str, shard: Shard) -> None:
        """This rank's part; on the first rank that makes room for the whole."""
        part, num_parts = shard.local, shard.num_parts or self._num_ranks
        if self._rank != 0:
            if self._rank < num_parts and part.numel() and not shard.is_whole:
                self._parts.append(dist.P2POp(dist.isend, _bytes_of(part.contiguous()), 0, self._group))
            return
        whole = part
        if not shard.is_whole:
            whole = torch.empty(shard.shape, dtype=part.dtype, device=part.device)
            whole[: len(part)] = part
            for rank in range(1, num_parts):
                rows = rows_of(len(whole), num_parts, rank)
                if rows:
                    place = _bytes_of(whole[rows.start : rows.stop])
                    self._parts.append(dist.P2POp(dist.irecv, place, rank, self._group))
        self._whole.append((name, whole))

    def begun(self) -> RowGather:
        """The same, under way; nothing is to be added any more."""
        if self._parts:
            self._works = dist.batch_isend_irecv(self._parts)
        return self

    def arrived(self) -> Iterator[tuple[str, Tensor]]:
        """Whole, in the order in which they were added, each let go of when the next is asked for; nothing on other
        ranks than the first."""
        for work in self._works:
            work.wait()
        self._works, self._parts = [], []
        while self._whole:
            yield self._whole.popleft()


def whole_tensors(shards: Mapping[str, Shard], channel: CheckpointChannel) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor on the host, one at a time, on the first rank; nothing on the others, which send. Every
    rank has to go through it to the end: the others wait for it."""
    for name, shard in shards.items():
        gather = RowGather(channel.rank, channel.num_ranks, channel.group)
        gather.add(name, shard._replace(local=shard.local.to("cpu")))
        yield from gather.begun().arrived()


@torch.no_grad()
def copied_shard(tensor: Tensor, parked: ParkedMemory | None, dtype: torch.dtype | None = None) -> Shard:
    """This rank's part, in memory of its own on the host.

    Args:
        tensor: divided or not.
        parked: where its values are, if they are not in it.
        dtype: what a divided tensor of another floating type is rounded to: its parts are more exact than the model
            that they belong to.
    """
    shard = shard_of(tensor)
    source = shard.local if parked is None else parked.on_host(local_of(tensor)).detach()
    if dtype is not None and is_divided(tensor) and source.is_floating_point() and source.dtype != dtype:
        source = source.to(dtype)
    return shard._replace(local=fresh_copy(source))


def is_divided(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, not copied; a tensor that is not divided: itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; not every dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)
