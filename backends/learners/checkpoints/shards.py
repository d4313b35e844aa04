"""What a rank holds of a tensor that is divided over ranks: its part, and where that lies in the whole.

Invariants:

* Parts that begin at the same place are the same part: copies of each other on several ranks.
* The parts of all ranks together are the whole tensor.
* A tensor that is not divided is one part, which is the whole.
* A divided one is divided by rows (its first dimension): parts lie in the order of the ranks, as many rows each as
  ``torch.chunk`` gives, so the last ones may be smaller or empty.
* Under tensor parallelism it is divided twice: first, by rows or by columns, over the ranks that compute with it
  together, which are neighbours; then what each of them has, by rows, over the ranks that share it out.
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


class Division(NamedTuple):
    """How a tensor is divided over the first ranks, which have all of it; ranks after them have copies."""

    num_shards: int
    """Ranks that share out what a rank computes with."""
    num_tensor_ranks: int = 1
    """Ranks that compute with it together. Rank ``shard * num_tensor_ranks + tensor rank`` has a part."""
    tensor_dim: int | None = None
    """Dimension along which those divide it: 0 or 1; None: each of them has the same."""

    def place(self, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        """Where a rank's part lies in the whole, in each dimension."""
        shard, tensor_rank = divmod(rank, self.num_tensor_ranks)
        rows, rest = range(shape[0]), [slice(0, size) for size in shape[1:]]
        if self.tensor_dim is not None:
            own = rows_of(shape[self.tensor_dim], self.num_tensor_ranks, tensor_rank)
            if self.tensor_dim == 0:
                rows = own
            else:
                rest[self.tensor_dim - 1] = slice(own.start, own.stop)
        within = rows_of(len(rows), self.num_shards, shard)
        return slice(rows.start + within.start, rows.start + within.stop), *rest

    def is_counted(self, rank: int) -> bool:
        """Whether a rank's part is no copy of that of a rank before it."""
        shard, tensor_rank = divmod(rank, self.num_tensor_ranks)
        return shard < self.num_shards and (tensor_rank == 0 or self.tensor_dim is not None)


class Shard(NamedTuple):
    """One rank's part of a tensor."""

    local: Tensor
    """An ordinary tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins, in each dimension."""
    division: Division | None = None
    """None: each rank has rows of its own."""

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing beside this part."""
        return tuple(self.local.shape) == self.shape

    @property
    def is_cut(self) -> bool:
        """Whether its rows are not whole rows of the tensor."""
        return tuple(self.local.shape[1:]) != self.shape[1:]


@torch.no_grad()
def shard_of(tensor: Tensor) -> Shard:
    """This rank's part, not copied."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
    division = division_of(tensor)
    local = cast("DTensor", tensor.detach()).to_local()
    offset = tuple(place.start for place in own_place(tensor))
    return Shard(local, tuple(tensor.shape), offset, division)


def division_of(tensor: DTensor) -> Division:
    """Of a tensor that FSDP has divided, and tensor parallelism before it or not."""
    mesh, dim = tensor.device_mesh, None
    if mesh.ndim == 1:
        assert tensor.placements == (Sharded(0),), "divided by rows"
        ranks = mesh.mesh.tolist()  # which are not neighbours if those between have the same
        return Division(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    placement = tensor.placements[1]
    if not placement.is_replicate():
        dim = cast("Sharded", placement).dim % tensor.ndim
    return Division(mesh.size(0), mesh.size(1), dim)


def own_place(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's part of a divided tensor lies in the whole, in each dimension."""
    division, mesh = division_of(tensor), tensor.device_mesh
    tensor_rank = mesh.get_local_rank(1) if mesh.ndim > 1 else 0
    return division.place(tuple(tensor.shape), mesh.get_local_rank(0) * division.num_tensor_ranks + tensor_rank)


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
        self._apart: list[tuple[Tensor, Tensor]] = []
        """Places in a whole tensor whose rows do not follow each other in memory, and what comes for them."""
        self._works: list[Work] = []

    def add(self, name: str, shard: Shard) -> None:
        """This rank's part; on the first rank that makes room for the whole."""
        part, division = shard.local, shard.division or Division(self._num_ranks)
        if self._rank != 0:
            if division.is_counted(self._rank) and part.numel() and not shard.is_whole:
                self._parts.append(dist.P2POp(dist.isend, _bytes_of(part.contiguous()), 0, self._group))
            return
        whole = part
        if not shard.is_whole:
            whole = torch.empty(shard.shape, dtype=part.dtype, device=part.device)
            whole[division.place(shard.shape, 0)] = part
            for rank in filter(division.is_counted, range(1, self._num_ranks)):
                place = whole[division.place(shard.shape, rank)]
                if place.numel():
                    self._parts.append(dist.P2POp(dist.irecv, _bytes_of(self._landing(place)), rank, self._group))
        self._whole.append((name, whole))

    def _landing(self, place: Tensor) -> Tensor:
        """What is received into, for a part of a whole tensor."""
        if place.is_contiguous():
            return place
        landing = torch.empty(place.shape, dtype=place.dtype, device=place.device)
        self._apart.append((place, landing))
        return landing

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
        for place, landing in self._apart:
            place.copy_(landing)
        self._works, self._parts, self._apart = [], [], []
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
