"""What a format of models is to :mod:`.convert`: how a folder is read weight by weight, and how one is filled."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from penstock.backends.weights.tensor_file import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.checkpoint.examine import Examined

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8: Final = "fp8"
"""Matrices of layers in e4m3 numbers with scales, see :mod:`.fp8`."""
SHORT_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
KEPT: Final = ".e_score_correction_bias"
"""How the names of weights end that stay as they are: rounded, they would choose other experts."""


class ConversionPlan(NamedTuple):
    """What is to be made of a model."""

    dtype: str | None
    """Of weights that are floating-point numbers; None leaves each as it is, and ``fp8`` those that it is not for."""
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

    def matches(self, folder: Path) -> bool:
        """Whether a folder is of this format, by the names of its files."""
        ...

    def examine(self, folder: Path) -> Examined:
        """What is there, and why it cannot be read."""
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
            UserFault: what was read back is not what was written.
            OSError: the disk refuses.
        """
        ...


def planned_weights(model: OpenModel, plan: ConversionPlan) -> dict[str, Tensor]:
    """Tensors without memory, of the names, shapes and dtypes that will be written."""
    dtypes = model.dtypes()
    return {
        name: torch.empty(shape, dtype=_dtype_for(name, dtypes[name], plan.dtype), device="meta")
        for name, shape in model.shapes().items()
    }


def _dtype_for(name: str, found: torch.dtype, wanted: str | None) -> torch.dtype:
    is_left = wanted in (None, FP8) or not found.is_floating_point or name.endswith(KEPT)
    return found if is_left or wanted is None else DTYPES[wanted]


def digest_of_weight(tensor: Tensor) -> str:
    """SHA-256 of its bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()
