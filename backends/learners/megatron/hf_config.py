"""The keys of a Hugging Face ``config.json`` that say what a model computes. Nothing here interprets them."""

from __future__ import annotations

import msgspec


class RopeParameters(msgspec.Struct, frozen=True):
    """``rope_parameters`` of transformers 5, ``rope_scaling`` before."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class HfConfig(msgspec.Struct, frozen=True):
    """The keys that are read; the others do not change what is computed."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    quantization_config: dict[str, object] | None = None

    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    partial_rotary_factor: float | None = None
    rope_interleave: bool | None = None

    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    num_experts: int | None = None
    num_local_experts: int | None = None
    """Another name of the same; which one is written depends on the version of transformers."""
    n_routed_experts: int | None = None
    """And another, of DeepSeek."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    first_k_dense_replace: int | None = None
    moe_layer_freq: int = 1
    n_shared_experts: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None
    scoring_func: str | None = None
    topk_method: str | None = None

    @property
    def rope(self) -> RopeParameters:
        return self.rope_parameters or self.rope_scaling or RopeParameters()

    @property
    def expert_count(self) -> int | None:
        return self.num_experts or self.num_local_experts or self.n_routed_experts
