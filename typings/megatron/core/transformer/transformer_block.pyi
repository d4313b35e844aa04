from collections.abc import Sequence

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

class TransformerBlockSubmodules:
    layer_specs: Sequence[ModuleSpec] | None
    def __init__(self, layer_specs: Sequence[ModuleSpec], layer_norm: type) -> None: ...

def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None) -> int: ...
