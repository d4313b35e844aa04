"""What checkpoints of known families can ask for, and megatron-core would compute otherwise without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.checkpoint.hf_config import UNQUANTIZED

if TYPE_CHECKING:
    from penstock.backends.checkpoint.hf_config import DecoderConfig
    from penstock.backends.learners.megatron.bridge.families import Family


def unsupported(config: DecoderConfig, family: Family) -> str | None:
    """What the config asks for, as a clause with what was found and what is expected; None: nothing."""
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method")
        return f"its weights are quantized ({method}), {UNQUANTIZED}"
    if config.hidden_act != "silu":
        return f"hidden_act is '{config.hidden_act}', expected 'silu'"
    if config.mlp_bias:
        return "mlp_bias is true, expected false"
    if config.use_sliding_window:
        return "use_sliding_window is true, expected false"
    if config.attention_bias and family.qkv_bias == "never":
        return "attention_bias is true, expected false"
    if config.rope.kind not in family.rope_kinds:
        return f"rope_type is '{config.rope.kind}', expected one of {', '.join(family.rope_kinds)}"
    if family.has_latent_attention and (problem := _of_latent_attention(config)):
        return problem
    return _of_sigmoid_router(config) if family.router == "sigmoid" else None


def _of_latent_attention(config: DecoderConfig) -> str | None:
    rope = config.rope
    if config.rope_interleave is False:
        return "rope_interleave is false, expected true"
    if (rope.partial_rotary_factor or config.partial_rotary_factor or 1.0) != 1.0:
        return "partial_rotary_factor is not 1, expected 1"
    if rope.truncate is False:
        return "rope_parameters.truncate is false, expected true"
    if config.num_kv_heads != config.num_attention_heads:
        return f"num_key_value_heads is {config.num_key_value_heads}, expected num_attention_heads"
    return None


def _of_sigmoid_router(config: DecoderConfig) -> str | None:
    if config.norm_topk_prob is False:
        return "norm_topk_prob is false, expected true"
    for name, found, wanted in (
        ("scoring_func", config.scoring_func, "sigmoid"), ("topk_method", config.topk_method, "noaux_tc"),
    ):  # fmt: skip
        if found not in (None, wanted):
            return f"{name} is '{found}', expected '{wanted}'"
    if config.moe_layer_freq != 1:
        return f"moe_layer_freq is {config.moe_layer_freq}, expected 1"
    per_token, groups = config.num_experts_per_tok or 0, config.topk_group or 1
    if per_token == 1:
        return "num_experts_per_tok is 1, expected at least 2"
    if groups < (config.n_group or 1) and per_token // groups != 2:
        return (
            f"num_experts_per_tok {per_token} is not twice topk_group {groups}: the model scores a group by its best "
            f"two experts, and megatron-core by its best {per_token // groups}"
        )
    return None
