"""What a rank holds of a tensor that is divided over ranks: its part, and where that lies in the whole.

Invariants:

* Parts that begin at the same place are the same part: copies of each other on several ranks.
* The parts of all ranks together are the whole tensor.
* A tensor that is not divided is one part, which is the whole.
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.device_memory import ParkedMemory


class Shard(NamedTuple):
    """One rank's part of a tensor."""

    local: Tensor
    """An ordinary tensor."""
    shape: tuple[int, ...]
    """Of the whole."""
    offset: tuple[int, ...]
    """Where the part begins, in each dimension."""

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing beside this part."""
        return tuple(self.local.shape) == self.shape


@torch.no_grad()
def shard_of(tensor: Tensor) -> Shard:
    """This rank's part, not copied."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(cast("DTensor", tensor.detach()).to_local(), tuple(tensor.shape), tuple(offset))


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
        return shard._replace(local=source.to(dtype).to("cpu"))
    return shard._replace(local=source.to("cpu", copy=True))


def is_divided(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The tensor that holds this rank's part, always the same object; what :class:`.ParkedMemory` is to be given."""
    # to_local() is a new view each time.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]
