"""Tiny random models of many families of transformers."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from penstock.backends.checkpoint.terminal import quiet_transformers

if TYPE_CHECKING:
    from pathlib import Path

models: Any = transformers
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LATENT: dict[str, Any] = DEEPSEEK | {
    "head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1, "topk_group": 1,
}  # fmt: skip
NEXT: dict[str, Any] = EXPERTS | {
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
PACKED: dict[str, Any] = {
    "llama": lambda: models.LlamaConfig(**SIZES),
    "mistral": lambda: models.MistralConfig(**SIZES, sliding_window=8),
    "mixtral": lambda: models.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: models.Qwen2Config(**SIZES),
    "qwen3": lambda: models.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: models.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gemma2": lambda: models.Gemma2Config(
        **SIZES, sliding_window=8, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3_text": lambda: models.Gemma3TextConfig(**SIZES, sliding_window=8),
    "phi3": lambda: models.Phi3Config(**SIZES, sliding_window=8),
    "phi3, of which a part is turned": lambda: models.Phi3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    ),
    "smollm3": lambda: models.SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 1, 0]),
    "olmoe": lambda: models.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2),
    "granite": lambda: models.GraniteConfig(
        **SIZES, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "gpt_oss": lambda: models.GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=8),
    "glm4": lambda: models.Glm4Config(**SIZES),
    "glm4_moe": lambda: models.Glm4MoeConfig(**SIZES, **DEEPSEEK, use_qk_norm=True),
    "glm4_moe_lite": lambda: models.Glm4MoeLiteConfig(**SIZES | LATENT),
    "deepseek_v3": lambda: models.DeepseekV3Config(**SIZES | LATENT, first_k_dense_replace=1),
    "minimax_m2": lambda: models.MiniMaxM2Config(**SIZES, num_local_experts=8, num_experts_per_tok=2),
    "mimo_v2_flash": lambda: models.MiMoV2FlashConfig(**SIZES | {"v_head_dim": 12} | DEEPSEEK),
}
PADDED: dict[str, Any] = {
    "falcon_h1": lambda: models.FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=128),
    "bamba": lambda: models.BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1, 3]),
    "lfm2": lambda: models.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "qwen3_next": lambda: models.Qwen3NextConfig(**SIZES, **NEXT),
    "qwen3_5_text": lambda: models.Qwen3_5TextConfig(**SIZES, **{k: v for k, v in NEXT.items() if "linear" in k}),
}


def made(config: Any, folder: Path) -> Path:  # noqa: ANN401 - a config of transformers
    torch.manual_seed(2)
    model = models.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder
