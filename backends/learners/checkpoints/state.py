"""The trainer's state on disk: written by any number of ranks with torch.distributed.checkpoint, read by any other.

Every rank writes its own parts (``shard-00003-model-…`` is of the third rank) and reads only what it needs. The
storage is that of :class:`HuggingFaceStorageWriter`, safetensors files that say in their headers where each part
belongs. The usual storage of torch.distributed.checkpoint keeps this in a pickle, which would have to be trusted before
anything else of a checkpoint can be looked at; safetensors has all that is needed here, parts and whole tensors and
reading into another division, because the state consists of tensors alone (what is none lies in the record).

Invariants:

* Nothing is unpickled from disk.
* What is read has the bits of what was written, however it was divided and is divided now.
* Which files there are, and that they are whole, is for the record to say, before. A tensor with a hole is refused
  here as well, not filled with what happened to be in memory.
* Copies of one part on several ranks are written once, by the rank that has least to write.
* Reading needs no other rank.
"""

# torch.distributed and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.backends.learners.checkpoints.record import CheckpointError
from penstock.backends.learners.checkpoints.shards import own_place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.checkpoints.channel import CheckpointChannel
    from penstock.backends.learners.checkpoints.shards import Shard

MAX_FILE_BYTES: Final = 1_000_000_000
"""A file is put together in memory before it is written, so this much is needed besides the copy of the state."""

# One process is what is meant where there is no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def save_state(folder: Path, shards: Mapping[str, Shard], channel: CheckpointChannel) -> None:
    """Write this rank's parts into a folder that all ranks see; durable when it returns. Every rank calls it; of some
    tensors a rank may have no part.

    Raises:
        CheckpointException: a disk refuses, on any rank.
    """
    save(
        dict(shards),
        storage_writer=HuggingFaceStorageWriter(
            str(folder), save_distributed=True, fqn_to_index_mapping=_file_numbers(shards, channel)
        ),
        planner=_ShardPlanner(),
        process_group=channel.group,
        no_dist=channel.group is None,
    )


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """What :func:`save_state` has written on this rank; a rank whose parts others have as well may write nothing."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def load_state(
    folder: Path, layouts: Mapping[str, Tensor] | None = None, *, is_wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Tensor]:
    """Read tensors that :func:`save_state` wrote, into memory of their own.

    Args:
        folder: of the state.
        layouts: name → a tensor of that shape which lies where, and is divided as, the result shall be. What has none,
            or one of another shape, is read whole, to the host.
        is_wanted: whether a tensor is to be read.

    Raises:
        CheckpointError: files are missing, damaged, or no state.
    """
    try:
        reader = HuggingFaceStorageReader(str(folder))
        found = cast("dict[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata)
        tensors = {
            name: _place_for(name, metadata, (layouts or {}).get(name), folder)
            for name, metadata in found.items()
            if is_wanted(name)
        }
        load(
            cast("dict[str, Any]", tensors),
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{folder}: the state of the trainer cannot be read: {error}") from error
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder}: the state of the trainer cannot be read: {cause}") from error
    return tensors


def _place_for(name: str, metadata: TensorStorageMetadata, layout: Tensor | None, folder: Path) -> Tensor:
    """Memory to read a tensor into."""
    num_found = sum(math.prod(chunk.sizes) for chunk in metadata.chunks)
    if num_found != math.prod(metadata.size):
        raise CheckpointError(
            f"{folder}: expected {math.prod(metadata.size):,} elements of {name}, found {num_found:,}: a file of a "
            "rank is missing"
        )
    dtype = metadata.properties.dtype
    if layout is None or layout.shape != metadata.size or not _is_found(layout):
        return torch.empty(metadata.size, dtype=dtype)
    return torch.empty_like(layout, dtype=dtype, requires_grad=False)


def _is_found(layout: Tensor) -> bool:
    """Whether torch knows where the part of this rank lies: of uneven parts of uneven parts it does not always."""
    if not isinstance(layout, DTensor):
        return True
    size, offset = compute_local_shape_and_global_offset(layout.shape, layout.device_mesh, layout.placements)
    local = layout.to_local()
    is_there = not local.numel() or offset == tuple(place.start for place in own_place(layout))
    return size == tuple(local.shape) and is_there


def _file_numbers(shards: Mapping[str, Shard], channel: CheckpointChannel) -> dict[str, int]:
    """Tensor → number of the file for its part, the same on every rank, whichever of them have parts of it."""
    own = {name: math.prod(shard.shape) * shard.local.itemsize for name, shard in shards.items()}
    sizes = {name: size_bytes for of_rank in channel.each(lambda: own) for name, size_bytes in of_rank.items()}
    numbers: dict[str, int] = {}
    number, num_bytes = 1, 0
    for name in sorted(sizes):
        size_bytes = sizes[name]
        if num_bytes and num_bytes + size_bytes > MAX_FILE_BYTES:
            number, num_bytes = number + 1, 0
        numbers[name] = number
        num_bytes += size_bytes
    return numbers


class _ShardPlanner(DefaultSavePlanner):
    """Plans parts that have been copied to the host and know their place themselves."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        shards = cast("dict[str, Shard]", self.state_dict)
        self.plan = SavePlan([_write_item(name, shard) for name, shard in shards.items() if _has_data(shard)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return cast("dict[str, Shard]", self.state_dict)[index.fqn].local


def _has_data(shard: Shard) -> bool:
    """A rank may have nothing of a small tensor; an empty tensor is written all the same."""
    return shard.is_whole or bool(shard.local.numel())


def _write_item(name: str, shard: Shard) -> WriteItem:
    offset = torch.Size(shard.offset)
    return WriteItem(
        index=MetadataIndex(name, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=shard.local.shape),
            properties=TensorProperties.create_from_tensor(shard.local),
            size=torch.Size(shard.shape),
        ),
    )
