"""Writes a distributed checkpoint of megatron-core: parts of tensors that any number of ranks hold, see
:mod:`.dist_format`.

megatron-core would write it by processes of its own, forked from this one, and a helper that outlives it when it is
killed. Forking a process with the threads of gloo or NCCL in it is not safe, and no rank may leave a process behind; so
the same files are written here, on the thread that calls.

Invariants:

* What lies on disk is what megatron-core itself reads.
* Each part is written by the rank that brings it, and no part is brought twice.
* One part at a time is made from what it is read from.
"""

# torch's checkpoints are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.backends.learners.megatron.checkpoint.dist_format import COMMON_FILE, CONFIG_FILE, PART_SUFFIX, DistConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.checkpoints.channel import CheckpointChannel


class WrittenPart(NamedTuple):
    """A box of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """The box, on the host."""

    @property
    def key(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offset))


def write_parts(folder: Path, parts: Sequence[WrittenPart], common: dict[str, Any], channel: CheckpointChannel) -> None:
    """Fill an empty folder that all ranks see; durable when it returns. Every rank calls it.

    Args:
        folder: the folder.
        parts: that this rank brings.
        common: what is no tensor, for whoever reads it with megatron-core; the first rank's is written.
        channel: to the other ranks.

    Raises:
        CheckpointException: a disk refuses, on any rank.
        OSError: likewise, on the first.
    """
    save(
        dict.fromkeys((part.name for part in parts), None),
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1),
        planner=_PartPlanner(parts),
        process_group=channel.group,
        no_dist=channel.group is None,
    )
    if channel.is_first:
        torch.save(common, folder / COMMON_FILE)
        (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(DistConfig()))


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """What :func:`write_parts` has written on this rank; a rank that brought nothing has written nothing."""
    return sorted(folder.glob(f"__{rank}_*{PART_SUFFIX}"))


class _PartPlanner(DefaultSavePlanner):
    """Plans parts that know their place themselves."""

    def __init__(self, parts: Sequence[WrittenPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {part.key: part for part in parts}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(part) for part in self._parts.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Without torch's comparison of every part with every other: of the experts of a large model there are so many
        that it would take a minute from training. What it could find, reading finds too."""
        global_plan, metadata = create_default_global_save_plan(all_plans)
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            num_elements = sum(math.prod(chunk.sizes) for chunk in found.chunks)
            if num_elements != math.prod(found.size):
                raise ValueError(
                    f"{name}: the ranks bring {num_elements:,} elements, and it has {math.prod(found.size):,}; this is "
                    "a mistake of the learner's"
                )
        self.global_plan, self.metadata = global_plan, metadata
        return global_plan, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index].read()


def _write_item(part: WrittenPart) -> WriteItem:
    return WriteItem(
        index=part.key,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=torch.Size(part.sizes)),
            properties=TensorProperties(dtype=part.dtype),
            size=torch.Size(part.shape),
        ),
    )
