"""Reading the safetensors of a model folder, in one file or in shards.

Invariants:

* A tensor is read when it is asked for, so opening a checkpoint costs its headers only.
* The index is checked against the files when the checkpoint is opened, not in the middle of a load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, cast

from safetensors import SafetensorError, safe_open

from penstock.backends.checkpoint.hf_config import INDEX_FILE, find_weight_map
from penstock.backends.weights.tensor_file import DTYPES
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    import torch

SINGLE_FILE: Final = "model.safetensors"


class TensorSlice(Protocol):
    """A tensor of which that is read which is asked for, by rows and columns."""

    def __getitem__(self, places: slice | tuple[slice, ...], /) -> torch.Tensor: ...
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _Shard(Protocol):
    """What ``safe_open`` returns (the library has no types)."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> TensorSlice: ...


class CheckpointTensors(Mapping[str, "torch.Tensor"]):
    """Parameter name → CPU tensor, read on demand. A context manager: the files are closed at its end.

    Raises:
        UserFault: no safetensors in the folder, or a shard is missing, malformed, or lacks what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._shard_of: dict[str, _Shard] = {}
        with ExitStack() as on_error:
            on_error.callback(self._files.close)
            if (weight_map := find_weight_map(folder)) is not None:
                self._open_shards(folder, weight_map)
            elif (folder / SINGLE_FILE).is_file():
                shard = self._open(folder / SINGLE_FILE)
                self._shard_of = dict.fromkeys(shard.keys(), shard)
            else:
                raise UserFault(
                    f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with safe_serialization"
                )
            on_error.pop_all()

    def _open_shards(self, folder: Path, names_to_files: dict[str, str]) -> None:
        shards: dict[str, _Shard] = {}
        for file_name in sorted(set(names_to_files.values())):
            shard_path = folder / file_name
            if not shard_path.is_file():
                raise UserFault(f"{folder} lacks {file_name}, which {INDEX_FILE} names; copy the whole folder")
            shards[file_name] = self._open(shard_path)
        keys = {file_name: set(shard.keys()) for file_name, shard in shards.items()}
        for name, file_name in names_to_files.items():
            if name not in keys[file_name]:
                raise UserFault(f"{folder / file_name} lacks {name}, which {INDEX_FILE} promises")
            self._shard_of[name] = shards[file_name]

    def _open(self, path: Path) -> _Shard:
        try:
            return cast("_Shard", self._files.enter_context(safe_open(str(path), framework="pt")))
        except SafetensorError as error:
            raise UserFault(f"{path} is no whole safetensors file: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name → shape, from the headers."""
        return {name: tuple(shard.get_slice(name).get_shape()) for name, shard in self._shard_of.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Parameter name → dtype, from the headers.

        Raises:
            UserFault: a dtype that torch does not have.
        """
        found = {name: shard.get_slice(name).get_dtype() for name, shard in self._shard_of.items()}
        for name, dtype in found.items():
            if dtype not in DTYPES:
                raise UserFault(f"{name} has dtype {dtype}; expected one of {', '.join(DTYPES)}")
        return {name: DTYPES[dtype] for name, dtype in found.items()}

    def slice(self, name: str) -> TensorSlice:
        """One tensor, to read parts of it.

        Raises:
            UserFault: it is not there.
        """
        if name not in self._shard_of:
            raise UserFault(f"{self._folder}: no tensor {name}; the architecture in its config.json has one")
        return self._shard_of[name].get_slice(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._shard_of[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._shard_of = {}
        self._files.close()
