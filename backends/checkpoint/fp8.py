"""Weights in FP8 as DeepSeek-V3 publishes them: matrices of e4m3 numbers, and a float32 scale for each block of them.

A weight is ``q · s``, with ``q`` the e4m3 number and ``s`` the entry of ``…weight_scale_inv`` for its block. The scale
of a block is its largest magnitude divided by 448, the largest e4m3 number; of a block of zeros it is 1.

Invariants:

* At most one matrix is in memory, as it was and as it will be, with one row of its blocks in float32.
* What was quantized from bfloat16 comes back the same, to the bit, from FP8 through bfloat16 to FP8: the largest number
  of a block is 448, and 448 times its scale, in bfloat16, is the number that the scale was made of. Scales that were
  made of wider numbers may move by one part in 256 on their first way through bfloat16, the e4m3 numbers do not.
* A number that is infinite or none at all is refused with the name of its weight, never written as another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch.nn import functional

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, DecoderConfig, find_config
from penstock.backends.checkpoint.model_format import DTYPES, FP8
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.checkpoint.model_format import OpenModel

E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
SCALE: Final = "_scale_inv"
"""What a weight's name has behind it to be that of its scales."""
SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny

_MATRIX: Final = re.compile(r"model\.layers\.\d+\.(?!eh_proj\.)(.+\.)?\w*_proj(_with_mqa)?\.weight")
"""The matrices of layers; routers, norms, embeddings, the head, and what joins the inputs of a prediction layer stay as
they are, as in the published checkpoints."""


class Blocks(NamedTuple):
    """Into what blocks matrices are divided, from their first row and column on; the last ones may be smaller."""

    rows: int = 128
    columns: int = 128

    def scales_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        rows, columns = shape
        return -(-rows // self.rows), -(-columns // self.columns)


BLOCKS: Final = Blocks()
"""Of what is written here."""


def find_blocks(folder: Path) -> Blocks | None:
    """Of a checkpoint in FP8; None where its weights are not quantized.

    Raises:
        UserFault: they are quantized in another way.
    """
    config = find_config(folder / CONFIG_FILE, DecoderConfig)
    found = config.quantization_config if config is not None else None
    if found is None:
        return None
    method, form, size = found.get("quant_method"), found.get("fmt", "e4m3"), found.get("weight_block_size")
    sizes = cast("list[object]", size) if isinstance(size, list) else []
    rows, columns = sizes if len(sizes) == 2 else (0, 0)
    if method != FP8 or form != "e4m3" or not (isinstance(rows, int) and isinstance(columns, int) and rows and columns):
        raise UserFault(
            f"{folder / CONFIG_FILE}: quantization_config has quant_method {method}, fmt {form} and weight_block_size "
            f"{size}; expected fp8 and e4m3 in blocks such as [128, 128], or weights that are not quantized: take the "
            "model's checkpoint in bfloat16"
        )
    return Blocks(rows, columns)


def quantization_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What ``config.json`` says of a checkpoint in FP8, with the names of the matrices that are not."""
    kept = [
        name
        for name, weight in weights.items()
        if weight.ndim == 2 and weight.dtype != E4M3 and not name.endswith((SCALE, "embed_tokens.weight"))
    ]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": FP8,
        "weight_block_size": list(BLOCKS),
        "modules_to_not_convert": [name.removesuffix(".weight") for name in kept],
    }


def is_for_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of this name is written in FP8."""
    return len(shape) == 2 and _MATRIX.fullmatch(name) is not None


def quantize(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as e4m3 numbers and the scales of their blocks; ``name`` is for errors.

    Raises:
        UserFault: it has numbers that are infinite, or none at all.
    """
    quantized = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scales = torch.empty(BLOCKS.scales_of(tuple(weight.shape)), dtype=torch.float32, device=weight.device)
    num_columns = weight.shape[1]
    for row, strip in enumerate(torch.split(weight, BLOCKS.rows)):
        values = strip.float()
        if not values.isfinite().all():
            raise UserFault(f"{name}: has numbers that are infinite or NaN, and FP8 has no place for them")
        largest = functional.pad(values.abs().amax(0), (0, -num_columns % BLOCKS.columns))
        largest = largest.view(-1, BLOCKS.columns).amax(1)
        scales[row] = torch.where(largest > 0, (largest / E4M3_MAX).clamp(min=SMALLEST_SCALE), 1.0)
        scaled = values / _widened(scales[row], BLOCKS, num_columns)
        quantized[row * BLOCKS.rows :][: len(strip)] = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return quantized, scales


def dequantize(name: str, quantized: Tensor, scales: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The matrix that e4m3 numbers and the scales of their blocks stand for; ``name`` is for errors.

    Raises:
        UserFault: a scale is no positive number, or a number of the matrix is none at all.
    """
    if not (scales.isfinite().all() and (scales > 0).all()):
        raise UserFault(f"{name}{SCALE}: has scales that are not positive and finite; fetch the checkpoint anew")
    weight = torch.empty(quantized.shape, dtype=dtype)
    for row, strip in enumerate(torch.split(quantized, blocks.rows)):
        values = strip.float() * _widened(scales[row].float(), blocks, quantized.shape[1])
        if not values.isfinite().all():
            raise UserFault(f"{name}: has numbers that are infinite or NaN; fetch the checkpoint anew")
        weight[row * blocks.rows :][: len(strip)] = values
    return weight


def _widened(scales: Tensor, blocks: Blocks, num_columns: int) -> Tensor:
    """The scale of each column, of those of one row of blocks."""
    return scales.repeat_interleave(blocks.columns)[:num_columns]


def problems_of(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], blocks: Blocks) -> list[str]:
    """Weights in FP8 without scales of their blocks."""
    found: list[str] = []
    for name, shape in shapes.items():
        if dtypes[name] != E4M3:
            continue
        scales = shapes.get(name + SCALE)
        if len(shape) != 2 or scales != blocks.scales_of(shape):
            said = "there are none" if scales is None else f"found {list(scales)}"
            found.append(f"{name}: FP8 {list(shape)} in blocks of {list(blocks)} has no fitting {name}{SCALE}: {said}")
    return found


def recoded(model: OpenModel, folder: Path, dtype: str | None) -> OpenModel:
    """A model whose weights are in FP8 where ``dtype`` wants that, and not where it wants another; None, or what is
    wanted already, leaves it as it is.

    Raises:
        UserFault: it is quantized in another way, or has no matrix that FP8 is for.
    """
    blocks = find_blocks(folder) if dtype is not None else None
    if dtype is None or (dtype == FP8) == (blocks is not None):
        return model
    if blocks is not None:
        return _Dequantized(model, blocks, DTYPES[dtype])
    quantized = _Quantized(model)
    if len(quantized.shapes()) == len(model.shapes()):
        raise UserFault(f"{folder}: has no matrices named model.layers.….…_proj.weight, which FP8 is for")
    return quantized


class _Dequantized:
    """A model in FP8, read as one whose matrices are not."""

    def __init__(self, model: OpenModel, blocks: Blocks, dtype: torch.dtype) -> None:
        self._model = model
        self._blocks = blocks
        self._dtype = dtype
        self._dtypes = model.dtypes()
        self._quantized = {name for name, dtype in self._dtypes.items() if dtype == E4M3}
        self._scales = {name + SCALE for name in self._quantized}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._model.shapes().items() if name not in self._scales}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self._dtype if name in self._quantized else self._dtypes[name] for name in self.shapes()}

    def __getitem__(self, name: str, /) -> Tensor:
        if name not in self._quantized:
            return self._model[name]
        return dequantize(name, self._model[name], self._model[name + SCALE], self._blocks, self._dtype)


class _Quantized:
    """A model read as FP8. A weight is followed by its scales, so that it is read once for both."""

    def __init__(self, model: OpenModel) -> None:
        self._model = model
        self._last: tuple[str, Tensor, Tensor] | None = None
        self._matrices = {
            name: BLOCKS.scales_of(shape) for name, shape in model.shapes().items() if is_for_matrix(name, shape)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self._model.shapes().items():
            found[name] = shape
            if name in self._matrices:
                found[name + SCALE] = self._matrices[name]
        return found

    def dtypes(self) -> dict[str, torch.dtype]:
        found = self._model.dtypes()
        of_matrices = dict.fromkeys(self._matrices, E4M3)
        return found | of_matrices | {name + SCALE: torch.float32 for name in self._matrices}

    def __getitem__(self, name: str, /) -> Tensor:
        weight = name.removesuffix(SCALE)
        if weight not in self._matrices:
            return self._model[name]
        if self._last is None or self._last[0] != weight:
            self._last = (weight, *quantize(weight, self._model[weight]))
        _, quantized, scales = self._last
        return quantized if name == weight else scales
