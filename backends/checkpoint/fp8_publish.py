"""Weights that are published in FP8: quantized where they leave the learner, and made plain again where an engine has
no products for them.

Invariants:

* A matrix is quantized by the one function that writes checkpoints in FP8 (:mod:`.fp8`), so what an engine gets has the
  bits of a copy that ``penstock convert --dtype fp8`` writes of the same weights.
* Where weights come as a stream, one matrix is quantized at a time; its numbers come before its scales.
* What a learner publishes with numbers that are infinite, or none at all, is refused, never written as another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.fp8 import BLOCKS, E4M3, SCALE, dequantize, is_for_matrix, quantize
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter, WeightFetcher
    from penstock.backends.weights.stream import AnyWeights, WeightStream
    from penstock.messages.weights import Canary, WeightManifest

META: Final = torch.device("meta")


class QuantizingExporter:
    """Exports through another one, with the matrices of layers in FP8."""

    def __init__(self, inner: WeightExporter) -> None:
        self._inner = inner

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`.WeightExporter`.

        Raises:
            WeightExportError: a number is infinite or none at all, or there is no matrix that FP8 is for.
        """
        shapes = tensors if isinstance(tensors, Mapping) else tensors.shapes
        if not any(is_for_matrix(name, tuple(tensor.shape)) for name, tensor in shapes.items()):
            raise WeightExportError("engines.quantization: the model has no model.layers.….…_proj.weight to quantize")
        quantized: AnyWeights
        if isinstance(tensors, Mapping):
            quantized = dict(pair for name, tensor in tensors.items() for pair in _in_fp8(name, tensor))
        else:
            quantized = _QuantizedStream(tensors)
        return self._inner.export(quantized, version=version, publish=publish, canary=canary)

    def release(self, below_version: int) -> None:
        """See :class:`.WeightExporter`."""
        self._inner.release(below_version)

    def close(self) -> None:
        """See :class:`.WeightExporter`."""
        self._inner.close()


class _QuantizedStream:
    """See :class:`.WeightStream`."""

    def __init__(self, inner: WeightStream) -> None:
        self._inner = inner

    @property
    def shapes(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in self._inner.shapes.items():
            shape = tuple(tensor.shape)
            is_matrix = is_for_matrix(name, shape)
            found[name] = torch.empty(shape, dtype=E4M3, device=META) if is_matrix else tensor
            if is_matrix:
                found[name + SCALE] = torch.empty(BLOCKS.scales_of(shape), dtype=torch.float32, device=META)
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return (pair for name, tensor in self._inner.tensors() for pair in _in_fp8(name, tensor))


def _in_fp8(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not is_for_matrix(name, tuple(tensor.shape)):
        yield name, tensor
        return
    try:
        quantized, scales = quantize(name, tensor.detach())
    except UserFault as error:
        raise WeightExportError(f"{error}: the learner has diverged") from None
    yield name, quantized
    yield name + SCALE, scales


def quantizing_exporter(exporter: WeightExporter, *, quantizes: bool) -> WeightExporter:
    """The same one where nothing is quantized."""
    return QuantizingExporter(exporter) if quantizes else exporter


class PlainFetcher:
    """Fetches through another one, and makes plain what is in FP8: for an engine that multiplies with plain numbers."""

    def __init__(self, inner: WeightFetcher, dtype: torch.dtype) -> None:
        self._inner = inner
        self._dtype = dtype

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        """See :class:`.WeightFetcher`."""
        fetched = self._inner.fetch(manifest)
        try:
            return _PlainWeights(fetched, self._dtype)
        except UserFault as error:
            fetched.close()
            raise WeightFetchError(str(error)) from None


class _PlainWeights:
    """See :class:`.FetchedWeights`."""

    def __init__(self, inner: FetchedWeights, dtype: torch.dtype) -> None:
        self._inner = inner
        self._tensors = plain_tensors(inner.tensors, dtype)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    @property
    def digest(self) -> str:
        return self._inner.digest

    def digest_now(self) -> str:
        return self._inner.digest_now()

    def close(self) -> None:
        self._tensors = {}
        self._inner.close()


def plain_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What these weights stand for, without scales.

    Raises:
        UserFault: a matrix has no scales that fit it, or they are no positive numbers.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == E4M3:
            scales = tensors.get(name + SCALE)
            if scales is None or tuple(scales.shape) != BLOCKS.scales_of(tuple(tensor.shape)):
                raise UserFault(f"{name}: is in FP8, and has no scales of its blocks as {name}{SCALE}")
            found[name] = dequantize(name, tensor, scales, BLOCKS, dtype)
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in tensors):
            found[name] = tensor
    return found
