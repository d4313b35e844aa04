"""Values from the hidden states of the last stage.

Invariants:

* Every tensor-parallel rank gets the values of all its tokens. Under sequence parallelism each computes those of its
  own, and gets back the gradient of these alone.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.megatron.model.build import ParallelModel


def gathered_values(hidden: Tensor, weight: Tensor, bias: Tensor, *, is_divided: bool) -> Tensor:
    """``[S, 1, 1]`` from hidden states ``[S, 1, H]``, of which this rank has a share if ``is_divided``."""
    values = functional.linear(hidden.to(weight.dtype), weight, bias)
    if not is_divided:
        return values
    # Every rank goes on to the same loss, so each has the whole gradient, and none is to be added up.
    return gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)


class SharedHead(nn.Module):
    """Reads what the policy's output layer is given, while the policy runs."""

    def __init__(self, model: ParallelModel, device: torch.device) -> None:
        super().__init__()
        hidden_size = model.architecture.hidden_size
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self._is_divided = model.layout.sequence_parallel
        self._hidden: Tensor | None = None
        for chunk in model.chunks:
            if chunk.post_process:
                chunk.output_layer.register_forward_pre_hook(self._take)

    def values(self, *, of_trunk: bool = True) -> Tensor:
        """``[S]`` of the micro-batch whose logits were just computed; once.

        Args:
            of_trunk: whether gradients go on into the policy.
        """
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the last stage has run"
        if not of_trunk:
            hidden = hidden.detach()
        return gathered_values(hidden, self.weight, self.bias, is_divided=self._is_divided)[:, 0, 0]

    def _take(self, _: object, inputs: tuple[Any, ...]) -> None:
        self._hidden = inputs[0]
