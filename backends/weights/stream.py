"""Weights that reach a transport one after the other, so that some are still gathered while others are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from penstock.backends.weights.tensor_file import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from penstock.backends.weights.tensor_file import Layout, Placed


BUCKET_BYTES: Final = 256 * 2**20
"""Of weights that a learner's ranks bring together at once."""


class WeightStream(Protocol):
    """Weights that nobody has all at once. Tied ones come under one name."""

    @property
    def shapes(self) -> Mapping[str, torch.Tensor]:
        """All that will come, by name: their shapes and types on the device ``meta``."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each once, in any order and on any device; to be used before the next is asked for."""
        ...


AnyWeights = Mapping[str, "torch.Tensor"] | WeightStream


def planned(weights: AnyWeights) -> Layout:
    """The file that they make.

    Raises:
        WeightExportError: there are none, or one has a dtype without a form in the file.
    """
    return lay_out(weights if isinstance(weights, Mapping) else weights.shapes)


def placed_tensors(weights: AnyWeights, layout: Layout) -> Iterator[tuple[Placed, torch.Tensor]]:
    """Every tensor of the file, as it comes, with its place; where they are all here in the order of the file.

    Raises:
        ValueError: a stream gave others than it had said.
    """
    if isinstance(weights, Mapping):
        yield from ((place, weights[place.name]) for place in layout.placed)
        return
    places = {place.name: place for place in layout.placed}
    for name, tensor in weights.tensors():
        place = places.pop(name, None)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} was not announced, or has come before")
        yield place, tensor
    if places:
        raise ValueError(f"{next(iter(places))} was announced and has not come")
