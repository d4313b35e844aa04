"""Layers over Transformer Engine's that it does not have itself. Imported where CUDA is; nothing else can try them.

Invariants:

* Parameters have the names that :mod:`.layers` gives the same layers in plain torch.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine import TERowParallelLinear

from penstock.backends.learners.megatron.cpu.layers import norm_weight, rms_norm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor


class EngineRowParallelLinearNormed(TERowParallelLinear):
    """A linear layer whose result is normed before it is added to what it began with."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:  # noqa: ANN401 - megatron-core's own
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm_epsilon = config.layernorm_epsilon
        self.post_norm_weight = norm_weight(config, output_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)
        assert bias is None, "what is normed would have to have it"
        return rms_norm(output, self.post_norm_weight, self.post_norm_epsilon), None
