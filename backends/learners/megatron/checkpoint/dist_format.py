"""Reads a distributed checkpoint of megatron-core, in the format ``torch_dist``, and trusts none of its files.

In such a folder ``metadata.json`` names the format, ``.metadata`` says which tensors there are, of what shape, and in
which ``.distcp`` file each part of them lies, and ``common.pt`` has what is no tensor. ``.metadata`` and ``common.pt``
are pickles, and each part is wrapped in one.

Invariants:

* Nothing is made from disk but tensors and descriptions of tensors: ``.metadata`` may name the classes of these and
  nothing else, parts are read by torch's loader of weights alone, and ``common.pt`` is not read at all.
* A tensor with a hole is refused, not filled with what happened to be in memory.
* Reading needs no other rank, no process group and no megatron-core.
"""

# torch's checkpoints are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from penstock.backends.learners.checkpoints.record import CheckpointError
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE: Final = "metadata.json"
METADATA_FILE: Final = ".metadata"
COMMON_FILE: Final = "common.pt"
PART_SUFFIX: Final = ".distcp"
BACKEND: Final = "torch_dist"

_DESCRIPTIONS: Final = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
}  # fmt: skip
"""All that ``.metadata`` may name, besides dtypes."""


class DistConfig(msgspec.Struct):
    """What ``metadata.json`` says."""

    sharded_backend: str = BACKEND
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


class Part(NamedTuple):
    """A box of a tensor, as it lies in a file."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DistTensor(NamedTuple):
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


class DistReader:
    """The tensors of one folder."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: it has none, or they are not as they should be.
        """
        self.folder = folder
        self.tensors: dict[str, DistTensor] = _tensors_of(folder)
        self._last: tuple[Part, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            CheckpointError: it is not there, or not whole.
        """
        found = self._found(name)
        target = torch.empty(found.shape, dtype=found.dtype)
        self.read_into(name, target, (0,) * len(found.shape))
        return target

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor, offset: tuple[int, ...], *, pads: bool = False) -> None:
        """Fill a tensor with the box of another that begins at ``offset``.

        Args:
            name: of the other.
            target: as long as the box in each dimension, on any device and of any dtype.
            offset: in the other.
            pads: whether what lies beyond the other becomes 0.

        Raises:
            CheckpointError: it is not there, or a part of the box is not.
        """
        found = self._found(name)
        if pads:
            target.zero_()
        if target.ndim != len(found.shape):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(found.shape)}, and a part of "
                f"shape {list(target.shape)} is asked for"
            )
        num_wanted, num_read = _num_inside(offset, target.shape, found.shape), 0
        if num_wanted < target.numel() and not pads:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(found.shape)}, and the model wants {list(target.shape)} from "
                f"{list(offset)} on; is it a checkpoint of this model?"
            )
        for part in found.parts:
            if offset and not offset[0] - part.sizes[0] < part.offset[0] < offset[0] + target.shape[0]:
                continue  # of many experts nearly all
            box = [
                (max(at, own), min(at + size, own + own_size))
                for at, size, own, own_size in zip(offset, target.shape, part.offset, part.sizes, strict=True)
            ]
            if any(low >= high for low, high in box):
                continue
            there = tuple(slice(low - at, high - at) for (low, high), at in zip(box, offset, strict=True))
            here = tuple(slice(low - at, high - at) for (low, high), at in zip(box, part.offset, strict=True))
            target[there] = self._part(name, part)[here].to(device=target.device, dtype=target.dtype)
            num_read += math.prod(high - low for low, high in box)
        if num_read != num_wanted:
            raise CheckpointError(
                f"{self.folder}: expected {num_wanted:,} elements of {name}, found {num_read:,}: a part is missing"
            )

    def _found(self, name: str) -> DistTensor:
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: no tensor {name}; is it a checkpoint of this model?")
        return found

    def _part(self, name: str, part: Part) -> Tensor:
        """The last one is kept: neighbours often lie in the same."""
        if self._last is not None and self._last[0] == part:
            return self._last[1]
        self._last = None
        path = self.folder / part.file
        try:
            with path.open("rb") as file:
                file.seek(part.start)
                data = file.read(part.length)
            if len(data) != part.length:
                raise CheckpointError(f"{path}: {name} cannot be read: the file ends before it does")
            tensor = cast("Tensor", torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != part.sizes:
            raise CheckpointError(
                f"{path}: expected {name} of shape {list(part.sizes)}, found {list(tensor.shape)}: the file is damaged"
            )
        self._last = part, tensor
        return tensor


def is_distributed(folder: Path) -> bool:
    """Whether a folder is of this format."""
    return (folder / CONFIG_FILE).is_file() and (folder / METADATA_FILE).is_file()


def _tensors_of(folder: Path) -> dict[str, DistTensor]:
    metadata = _read_metadata(folder)
    places = {
        (index.fqn, tuple(index.offset or ())): info
        for index, info in cast("dict[Any, Any]", metadata.storage_data).items()
    }
    tensors: dict[str, DistTensor] = {}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            continue  # objects of Transformer Engine's 8-bit formats; what it would take to read them is not done here
        tensors[name] = _tensor(folder, name, found, places)
    return tensors


def _tensor(
    folder: Path, name: str, found: TensorStorageMetadata, places: dict[tuple[str, tuple[int, ...]], Any]
) -> DistTensor:
    parts: list[Part] = []
    for chunk in found.chunks:
        offset = tuple(chunk.offsets)
        info = places.get((name, offset))
        if info is None or Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(
                f"{folder / METADATA_FILE}: says of no file in this folder that it has {name} at {list(offset)}"
            )
        parts.append(Part(offset, tuple(chunk.sizes), info.relative_path, info.offset, info.length))
    return DistTensor(tuple(found.size), found.properties.dtype, tuple(parts))


def _read_metadata(folder: Path) -> Metadata:
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=DistConfig)
        if config.sharded_backend != BACKEND:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: expected the format {BACKEND}, found {config.sharded_backend}; save it "
                "anew in this one with megatron-core"
            )
        metadata = _DescriptionUnpickler(io.BytesIO((folder / METADATA_FILE).read_bytes())).load()
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{folder}: is no distributed checkpoint of megatron-core: {error}") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        if isinstance(error, UserFault):
            raise
        raise CheckpointError(f"{folder / METADATA_FILE} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / METADATA_FILE} is damaged: it describes no tensors")
    return metadata


class _DescriptionUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:  # noqa: ANN401 - pickle's
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


def _num_inside(offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Elements of a box that lie within a shape."""
    return math.prod(max(0, min(at + size, whole) - at) for at, size, whole in zip(offset, sizes, shape, strict=True))
