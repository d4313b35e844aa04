from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

@dataclass
class MultiTokenPredictionLayerSubmodules:
    enorm: object = ...
    hnorm: object = ...
    eh_proj: object = ...
    transformer_layer: object = ...
    layer_norm: object = ...

class MultiTokenPredictionBlockSubmodules:
    def __init__(self, *, layer_specs: Sequence[ModuleSpec]) -> None: ...

class MultiTokenPredictionLayer(nn.Module):
    config: TransformerConfig
    transformer_layer: nn.Module
    mtp_model_layer: nn.Module
    def forward(self, **given: object) -> tuple[Tensor, Tensor, Tensor]: ...
    def _checkpointed_forward(
        self, *functions: Callable[..., Tensor], hidden_states: Tensor, decoder_input: Tensor, **given: object
    ) -> Tensor: ...

class MultiTokenPredictionBlock(nn.Module):
    layers: Sequence[MultiTokenPredictionLayer]

def get_mtp_layer_spec(transformer_layer_spec: ModuleSpec, use_transformer_engine: bool) -> ModuleSpec: ...
