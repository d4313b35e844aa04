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

import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.fp8 import recoded
from penstock.backends.checkpoint.huggingface_format import HuggingFaceFormat
from penstock.backends.checkpoint.layers_beyond import with_layers_beyond
from penstock.backends.checkpoint.model_format import FP8, ConversionPlan, Converted, ModelFormat, planned_weights
from penstock.backends.durable import publish
from penstock.backends.learners.megatron.checkpoint.conversion import MegatronFormat
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path


UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
HUGGING_FACE: Final = "huggingface"
MEGATRON: Final = "megatron"

_SIZE: Final = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[a-zA-Z]*)")

FORMATS: Final[dict[str, ModelFormat]] = {MEGATRON: MegatronFormat(), HUGGING_FACE: HuggingFaceFormat()}
"""In this order a folder is asked whether it is of one."""


def format_of(folder: Path) -> str:
    """The format of a folder; what is of none is taken for Hugging Face's, and will be told what it lacks."""
    return next((name for name, each in FORMATS.items() if each.matches(folder)), HUGGING_FACE)


def convert_model(
    source: Path,
    target: Path,
    plan: ConversionPlan,
    *,
    begun: Callable[[int], Callable[[int], None]],
    target_format: str = HUGGING_FACE,
) -> Converted:
    """Write the model of one folder into another.

    Args:
        source: the folder of the model.
        target: must not be there.
        plan: what to make of it.
        begun: is given the number of bytes that will be written, and gives what is told of each part of them.
        target_format: one of :data:`FORMATS`.

    Raises:
        UserFault: the model has a problem, or the target cannot be written there.
        OSError: the disk refuses.
    """
    reader, writer = FORMATS[format_of(source)], FORMATS[target_format]
    _refuse_existing(target)
    if problems := reader.examine(source).problems:
        raise UserFault("; ".join(problems))
    if plan.dtype == FP8 and target_format == MEGATRON:
        raise UserFault(
            "--dtype fp8 is for Hugging Face format; megatron-core's checkpoints are in float32 or bfloat16"
        )
    with (
        reader.open(source) as opened,
        with_layers_beyond(opened, source) as whole,
        _written_beside(target) as partial,
    ):
        model = recoded(whole, source, plan.dtype)
        size_bytes = sum(tensor.nbytes for tensor in planned_weights(model, plan).values())
        _check_room(target.parent, size_bytes)
        return writer.write(source, model, partial, plan, begun(size_bytes))


def parse_size(text: str) -> int:
    """Bytes of a size such as ``5GB`` or ``512 MiB``.

    Raises:
        UserFault: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].upper() not in UNITS or not float(match["number"]):
        units = ", ".join(unit for unit in UNITS if unit)
        raise UserFault(f"'{text}' is no size; expected a number above 0 with one of {units}, such as 5GB")
    return int(float(match["number"]) * UNITS[match["unit"].upper()])


def _check_room(folder: Path, size_bytes: int) -> None:
    found = os.statvfs(folder)
    if (free := found.f_bavail * found.f_frsize) < size_bytes:
        raise UserFault(f"{folder}: the model needs {size_bytes:,} bytes, and {free:,} are free there")


def _refuse_existing(target: Path) -> Path:
    """Where to write before it gets its name."""
    partial = target.with_name(f".{target.name}.partial")
    for path in (target, partial):
        if os.path.lexists(path):
            raise UserFault(f"{path} is there already, and nothing is overwritten; remove it or name another")
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
