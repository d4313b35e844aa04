"""The layers that a checkpoint has beyond those of its model, to predict several tokens at once (``model.layers.61`` of
DeepSeek-V3, ``model.layers.46`` of GLM-4.5-Air). Where nothing trains them, what is saved keeps them as they were.

Invariants:

* A run has them once, in ``layers_beyond/`` beside its checkpoints, bit for bit those of the model that it began with;
  ``penstock convert`` puts them back among the weights.
* One tensor is in memory at a time. The folder appears when it is durable.
"""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, HfConfig, find_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.weight_files import DEFAULT_MAX_FILE_BYTES, WeightFiles
from penstock.backends.durable import publish

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable
    from pathlib import Path

    from penstock.backends.checkpoint.model_format import OpenModel

FOLDER: Final = "layers_beyond"
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_PREDICTS: Final = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
"""No other layer joins two vectors."""


def layers_beyond(names: Iterable[str], num_layers: int) -> dict[str, int]:
    """Of the tensors of a checkpoint those of layers that its ``config.json`` does not count, with their layer."""
    found = {name: int(match[1]) for name in names if (match := _LAYER.match(name))}
    return {name: layer for name, layer in found.items() if layer >= num_layers}


def predicting_layers(names: Collection[str]) -> set[int]:
    """The layers among the tensors of a checkpoint that predict further tokens."""
    return {int(match[1]) for name in names if (match := _PREDICTS.fullmatch(name))}


def keep_layers_beyond(model_folder: Path, target: Path) -> None:
    """Copy them from a model folder into one that has checkpoints, unless it has them already.

    Raises:
        OSError: the disk refuses.
        UserFault: the model cannot be read.
    """
    if (target / FOLDER).is_dir():
        return
    kept = _kept(model_folder)
    config = find_config(model_folder / CONFIG_FILE, HfConfig)
    num_layers = config.num_hidden_layers if config is not None else 0
    if kept is None and not (num_layers and any(model_folder.glob("*.safetensors"))):
        return
    with CheckpointTensors(kept or model_folder) as tensors:
        names = layers_beyond(tensors, num_layers)
        if names:
            _write(tensors, names, target)


def _kept(folder: Path) -> Path | None:
    """Where those of a checkpoint lie that does not have them among its weights."""
    return next((place for parent in (folder, folder.parent) if (place := parent / FOLDER).is_dir()), None)


def _write(tensors: CheckpointTensors, names: Iterable[str], target: Path) -> None:
    partial = target / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was ended
    partial.mkdir(parents=True)
    shapes, dtypes = tensors.shapes(), tensors.dtypes()
    planned = {name: torch.empty(shapes[name], dtype=dtypes[name], device="meta") for name in names}
    with WeightFiles(partial, planned, max_file_bytes=DEFAULT_MAX_FILE_BYTES) as files:
        for name in planned:
            files.write(name, tensors[name])
        files.finish()
    publish(partial, target / FOLDER)


@contextmanager
def with_layers_beyond(model: OpenModel, folder: Path) -> Generator[OpenModel]:
    """The model of a checkpoint with the layers that are kept in its folder, or beside it."""
    kept = _kept(folder)
    if kept is None:
        yield model
    else:
        with CheckpointTensors(kept) as tensors:
            yield _Both(model, tensors)


class _Both:
    """A model, and what it has besides."""

    def __init__(self, model: OpenModel, more: CheckpointTensors) -> None:
        self._model = model
        self._more = more
        self._own = frozenset(model.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._more.shapes() | self._model.shapes()

    def dtypes(self) -> dict[str, torch.dtype]:
        return self._more.dtypes() | self._model.dtypes()

    def __getitem__(self, name: str, /) -> torch.Tensor:
        return (self._model if name in self._own else self._more)[name]
