from collections.abc import Callable, Sequence

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

class MultiTokenPredictionLayerSubmodules:
    def __init__(
        self, *, enorm: type, hnorm: type, eh_proj: type, transformer_layer: ModuleSpec, layer_norm: type
    ) -> None: ...

class MultiTokenPredictionBlockSubmodules:
    def __init__(self, *, layer_specs: Sequence[ModuleSpec]) -> None: ...

class MultiTokenPredictionLayer(nn.Module):
    config: TransformerConfig
    transformer_layer: nn.Module
    def forward(self, **given: object) -> tuple[Tensor, Tensor, Tensor]: ...
    def _checkpointed_forward(
        self, forward_func: Callable[..., Tensor], *, hidden_states: Tensor, decoder_input: Tensor, **given: object
    ) -> Tensor: ...

class MultiTokenPredictionBlock(nn.Module):
    layers: Sequence[MultiTokenPredictionLayer]

def get_mtp_layer_spec(transformer_layer_spec: ModuleSpec, use_transformer_engine: bool) -> ModuleSpec: ...
