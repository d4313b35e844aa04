"""The safetensors of a model in Hugging Face format, written tensor by tensor.

Invariants:

* What will lie where is decided before the first byte, from names, shapes and dtypes alone; so only the tensor that is
  being written has to be in memory, and they may come in any order.
* A file is at most ``max_file_bytes`` long, unless one tensor alone is longer. Several files have an index beside them,
  a single one has none; names are those that transformers gives them.
* A folder is only as whole as :meth:`WeightFiles.finish` says: it refuses while a planned tensor is missing.
* The same tensors give the same bytes.
"""

# huggingface_hub is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch
from huggingface_hub import split_state_dict_into_shards_factory

from penstock.backends.checkpoint.hf_config import INDEX_FILE
from penstock.backends.weights.tensor_file import lay_out, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

    from penstock.backends.weights.tensor_file import Placed

DEFAULT_MAX_FILE_BYTES: Final = 5_000_000_000
SINGLE_FILE: Final = "model.safetensors"
FILE_PATTERN: Final = "model{suffix}.safetensors"


class WeightFileError(RuntimeError):
    """Tensors that are not those that were planned; a mistake of the caller."""


class _IndexMetadata(msgspec.Struct):
    total_parameters: int
    total_size: int


class _Index(msgspec.Struct):
    metadata: _IndexMetadata
    weight_map: dict[str, str]


class _Place(NamedTuple):
    file: str
    tensor: Placed


class WeightFiles:
    """Writes the weights of one model into a folder. A context manager: what it has opened is closed at its end."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor], *, max_file_bytes: int) -> None:
        """Make the files, still without their tensors.

        Args:
            folder: is there, and has no weights yet.
            weights: name → a tensor of the shape and dtype that will come, usually one without memory.
            max_file_bytes: where the next file begins.

        Raises:
            OSError: the disk refuses.
        """
        self._folder = folder
        self._open: dict[str, int] = {}
        self._places: dict[str, _Place] = {}
        self._num_parameters = sum(tensor.numel() for tensor in weights.values())
        split = split_state_dict_into_shards_factory(
            dict(weights),
            get_storage_size=_size_bytes,
            filename_pattern=FILE_PATTERN,
            max_shard_size=max_file_bytes,
        )
        try:
            for file, names in split.filename_to_tensors.items():
                self._begin(file, {name: weights[name] for name in names})
        except BaseException:
            self.close()
            raise
        self._missing = set(self._places)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor where it belongs.

        Raises:
            WeightFileError: it was not planned, has another shape or dtype, or is there already.
            OSError: the disk refuses.
        """
        place = self._places.get(name)
        if place is None or name not in self._missing:
            raise WeightFileError(f"{name} was {'not planned' if place is None else 'written already'}")
        planned = place.tensor
        if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
            raise WeightFileError(
                f"{name}: expected {planned.dtype} {list(planned.shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        _write_at(self._open[place.file], tensor_bytes(tensor), planned.start)
        self._missing.remove(name)

    def finish(self) -> None:
        """Write the index, where there are several files.

        Raises:
            WeightFileError: a planned tensor never came.
            OSError: the disk refuses.
        """
        if self._missing:
            raise WeightFileError(f"{len(self._missing)} tensors were not written, {min(self._missing)} first")
        if len(self._open) > 1:
            total_bytes = sum(place.tensor.size_bytes for place in self._places.values())
            index = _Index(
                _IndexMetadata(self._num_parameters, total_bytes),
                {name: self._places[name].file for name in sorted(self._places)},
            )
            (self._folder / INDEX_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(index)) + b"\n")

    def close(self) -> None:
        """Let go of the files, whole or not."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, file: str, weights: Mapping[str, Tensor]) -> None:
        layout = lay_out({name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()})
        handle = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._open[file] = handle
        _write_at(handle, memoryview(layout.header), 0)
        self._places |= {placed.name: _Place(file, placed) for placed in layout.placed}


def _size_bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _write_at(handle: int, data: memoryview[int], start: int) -> None:
    while data:
        num_bytes = os.pwrite(handle, data, start)
        data, start = data[num_bytes:], start + num_bytes
