"""The names that weights have in a checkpoint, where transformers holds them under others in memory.

Since transformers 5 the experts of a layer are one tensor in memory (``mlp.experts.gate_up_proj``), while checkpoints,
and whatever else reads them, have one per expert (``mlp.experts.7.up_proj.weight``).

Invariants:

* Names and values are those that ``save_pretrained`` writes.
* Experts of the usual names are views, so nothing is copied; what else transformers renames or splits is left to it.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

import torch
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

_FUSED: Final = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<what>gate_up|down)_proj")


class CheckpointNames:
    """Knows one model; its weights may change, its architecture may not."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by their names in memory to weights by their names in a checkpoint."""
        if self.can_rename_one_by_one:
            return _split_experts(tensors)
        return _as_saved(self._model, tensors)

    @property
    def can_rename_one_by_one(self) -> bool:
        """Whether one weight at a time can be renamed: splitting the experts is all that transformers does then. Asked
        with tensors that have no memory."""
        return self._can_rename_one_by_one

    @cached_property
    def _can_rename_one_by_one(self) -> bool:
        state = self._model.state_dict(keep_vars=True)
        weights = {name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in state.items()}
        split, saved = _split_experts(weights), _as_saved(self._model, weights)
        return {name: weight.shape for name, weight in split.items()} == {
            name: weight.shape for name, weight in saved.items()
        }


def _split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None or tensor.ndim != 3:
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor.unbind(0)):
            prefix = f"{match['experts']}.{expert}."
            if match["what"] == "down":
                split[f"{prefix}down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2, 0)
                split[f"{prefix}gate_proj.weight"], split[f"{prefix}up_proj.weight"] = gate, up
    return split


def _as_saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return cast("dict[str, Tensor]", revert_weight_conversion(model, dict(tensors)))


def kept_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer by its name in memory; one that has several names comes under the first."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def bare_name(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")
