from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    *,
    normalization: str | None = None,
) -> ModuleSpec: ...
def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules: ...
