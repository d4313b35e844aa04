"""The model of a checkpoint: a folder in Hugging Face format, put together from the parts of all ranks.

Invariants:

* transformers and engines load the folder as it is, and it does not show how many ranks have written it: names and
  values are those that ``save_pretrained`` writes.
* The first rank writes. It has one weight at a time in memory besides its own part of the model, unless transformers
  can translate the names of this architecture only when it has all of them.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.checkpoint.weight_files import DEFAULT_MAX_FILE_BYTES, WeightFiles
from penstock.backends.learners.checkpoints.shards import whole_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.checkpoints.channel import CheckpointChannel
    from penstock.backends.learners.checkpoints.shards import Shard
    from penstock.backends.learners.torch.model import PackedModel

ADAPTER_FOLDER: Final = "adapter"
SHARDED_PREFIX: Final = "FSDP"
"""What ``fully_shard`` puts before the name of a class."""


def write_model(folder: Path, model: PackedModel, shards: Mapping[str, Shard], channel: CheckpointChannel) -> None:
    """Write config and weights. Every rank calls it, with its parts of the same weights in the same order.

    Args:
        folder: is there, and has no model yet.
        model: for its class, its config and the names that its weights have in a checkpoint; it may run meanwhile.
        shards: by their names in memory.
        channel: to the other ranks.

    Raises:
        OSError: on the first rank: the disk refuses.
    """
    tensors = whole_tensors(shards, channel)
    try:
        if channel.is_first:
            _write_config(folder, model)
            _write_weights(folder, model, shards, tensors)
    finally:
        # The other ranks send whatever has become of the disk; and they send by going through it.
        deque(tensors, maxlen=0)


def write_adapters(
    folder: Path, model: PackedModel, shards: Mapping[str, Shard], channel: CheckpointChannel, *, base: str
) -> None:
    """Write the adapters of a model that has some as peft reads them, into ``adapter/``. Every rank calls it.

    Args:
        folder: of the checkpoint.
        model: of which they are.
        shards: of the trainer's state; what is not of adapters is not looked at.
        channel: to the other ranks.
        base: name of the model that they belong to.

    Raises:
        OSError: on the first rank: the disk refuses.
    """
    if model.adapters is None:
        return
    tensors = whole_tensors({name: shards[name] for name in model.adapters.state()}, channel)
    try:
        if channel.is_first:
            model.adapters.save(folder / ADAPTER_FOLDER, dict(tensors), base)
    finally:
        deque(tensors, maxlen=0)


def _write_config(folder: Path, model: PackedModel) -> None:
    config = copy.deepcopy(model.model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model.model).__name__.removeprefix(SHARDED_PREFIX)]
    with quiet_transformers():
        config.save_pretrained(folder)
        if model.model.can_generate():
            model.model.generation_config.save_pretrained(folder)


def _write_weights(
    folder: Path, model: PackedModel, shards: Mapping[str, Shard], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    names = model.checkpoint_names
    planned = names.rename(
        {name: torch.empty(shard.shape, dtype=shard.local.dtype, device="meta") for name, shard in shards.items()}
    )
    with WeightFiles(folder, planned, max_file_bytes=DEFAULT_MAX_FILE_BYTES) as files:
        if names.can_rename_one_by_one:
            for name, tensor in tensors:
                for saved_name, saved in names.rename({name: tensor}).items():
                    files.write(saved_name, saved)
        else:
            for saved_name, saved in names.rename(dict(tensors)).items():
                files.write(saved_name, saved)
        files.finish()
