"""Writing a model anew in another form: other files, another dtype, later another format.

Invariants:

* The folder appears under its name when everything is durable and has been read back: each weight has the name, shape,
  dtype and bytes that were meant to be written. Nothing is ever overwritten.
* One weight at a time is in memory.
* A model with a problem that keeps it from being loaded is refused before anything is written.

A format is one implementation of :class:`ModelFormat`; the weights go between formats by their names in Hugging Face
format, one at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from penstock.backends.durable import publish
from penstock.backends.engines.torch.checkpoint import CheckpointTensors
from penstock.backends.models.config_file import write_config
from penstock.backends.models.examine import examine_model
from penstock.backends.models.tokenizer_files import copy_tokenizer
from penstock.backends.models.weight_files import WeightFiles
from penstock.backends.weights.tensor_file import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
HUGGING_FACE: Final = "huggingface"

_SIZE: Final = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[a-zA-Z]*)")


class ConversionError(ValueError):
    """A model that cannot be converted like this. Nothing was written."""


class ConversionPlan(NamedTuple):
    """What is to be made of a model."""

    dtype: str | None
    """Of weights that are floating-point numbers; None leaves each as it is."""
    max_file_bytes: int


class Converted(NamedTuple):
    """What was written."""

    num_tensors: int
    size_bytes: int
    num_files: int


class OpenModel(Protocol):
    """A model that can be read weight by weight."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in Hugging Face format → shape."""
        ...

    def dtypes(self) -> dict[str, torch.dtype]:
        """Likewise."""
        ...

    def __getitem__(self, name: str, /) -> Tensor: ...


class ModelFormat(Protocol):
    """A way to keep a model in a folder."""

    def problems(self, folder: Path) -> tuple[str, ...]:
        """Why it cannot be read; empty if it can."""
        ...

    def open(self, folder: Path) -> AbstractContextManager[OpenModel]:
        """To read its weights."""
        ...

    def write(
        self, source: Path, model: OpenModel, target: Path, plan: ConversionPlan, report: Callable[[int], None]
    ) -> Converted:
        """Fill an empty folder with a model, and read it back.

        Args:
            source: folder whose config and tokenizer it gets.
            model: its weights.
            target: the empty folder.
            plan: what to make of it.
            report: is told how many bytes more have been written.

        Raises:
            ConversionError: what was read back is not what was written.
            OSError: the disk refuses.
        """
        ...


class HuggingFaceFormat:
    """Safetensors with config and tokenizer, as transformers and engines load them."""

    def problems(self, folder: Path) -> tuple[str, ...]:
        return examine_model(folder).problems

    def open(self, folder: Path) -> AbstractContextManager[OpenModel]:
        return CheckpointTensors(folder)

    def write(
        self, source: Path, model: OpenModel, target: Path, plan: ConversionPlan, report: Callable[[int], None]
    ) -> Converted:
        planned = _planned(model, plan)
        digests: dict[str, str] = {}
        with WeightFiles(target, planned, max_file_bytes=plan.max_file_bytes) as files:
            for name, like in planned.items():
                tensor = model[name].to(like.dtype)
                digests[name] = _digest(tensor)
                files.write(name, tensor)
                report(tensor.nbytes)
            files.finish()
        write_config(source, target, plan.dtype)
        copy_tokenizer(source, target)
        _read_back(target, planned, digests)
        return Converted(
            num_tensors=len(planned),
            size_bytes=sum(tensor.nbytes for tensor in planned.values()),
            num_files=len(list(target.glob("*.safetensors"))),
        )


FORMATS: Final[dict[str, ModelFormat]] = {HUGGING_FACE: HuggingFaceFormat()}


def convert_model(
    source: Path,
    target: Path,
    plan: ConversionPlan,
    *,
    begun: Callable[[int], Callable[[int], None]],
    source_format: str = HUGGING_FACE,
    target_format: str = HUGGING_FACE,
) -> Converted:
    """Write the model of one folder into another.

    Args:
        source: the folder of the model.
        target: must not be there.
        plan: what to make of it.
        begun: is given the number of bytes that will be written, and gives what is told of each part of them.
        source_format: one of :data:`FORMATS`.
        target_format: likewise.

    Raises:
        ConversionError: the model has a problem, or the target cannot be written there.
        OSError: the disk refuses.
    """
    reader, writer = FORMATS[source_format], FORMATS[target_format]
    _refuse_existing(target)
    if problems := reader.problems(source):
        raise ConversionError("; ".join(problems))
    with reader.open(source) as model, _written_beside(target) as partial:
        size_bytes = sum(tensor.nbytes for tensor in _planned(model, plan).values())
        _check_room(target.parent, size_bytes)
        return writer.write(source, model, partial, plan, begun(size_bytes))


def parse_size(text: str) -> int:
    """Bytes of a size such as ``5GB`` or ``512 MiB``.

    Raises:
        ConversionError: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].upper() not in UNITS or not float(match["number"]):
        units = ", ".join(unit for unit in UNITS if unit)
        raise ConversionError(f"'{text}' is no size; expected a number above 0 with one of {units}, such as 5GB")
    return int(float(match["number"]) * UNITS[match["unit"].upper()])


def _planned(model: OpenModel, plan: ConversionPlan) -> dict[str, Tensor]:
    """Tensors without memory, of the names, shapes and dtypes that will be written."""
    dtypes = model.dtypes()
    return {
        name: torch.empty(shape, dtype=_dtype_for(dtypes[name], plan.dtype), device="meta")
        for name, shape in model.shapes().items()
    }


def _dtype_for(found: torch.dtype, wanted: str | None) -> torch.dtype:
    return found if wanted is None or not found.is_floating_point else DTYPES[wanted]


def _read_back(folder: Path, planned: dict[str, Tensor], digests: dict[str, str]) -> None:
    with CheckpointTensors(folder) as tensors:
        if set(tensors) != set(planned):
            raise ConversionError(f"{folder}: wrote {len(planned)} weights and read {len(tensors)} back")
        for name, like in planned.items():
            tensor = tensors[name]
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape) or _digest(tensor) != digests[name]:
                raise ConversionError(f"{folder}: {name} is not on disk as it was written; is the disk sound?")
    if problems := examine_model(folder).problems:
        raise ConversionError("; ".join(problems))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def _check_room(folder: Path, size_bytes: int) -> None:
    found = os.statvfs(folder)
    if (free := found.f_bavail * found.f_frsize) < size_bytes:
        raise ConversionError(f"{folder}: the model needs {size_bytes:,} bytes, and {free:,} are free there")


def _refuse_existing(target: Path) -> Path:
    """Where to write before it gets its name."""
    partial = target.with_name(f".{target.name}.partial")
    for path in (target, partial):
        if os.path.lexists(path):
            raise ConversionError(f"{path} is there already, and nothing is overwritten; remove it or name another")
    return partial


@contextmanager
def _written_beside(target: Path) -> Generator[Path]:
    """A new folder to fill, which appears as ``target`` when the block is done and goes when it raises."""
    partial = _refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        yield partial
        publish(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
