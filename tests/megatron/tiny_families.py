"""Tiny models of every family that the Megatron learner builds, as transformers writes them."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

from tiny_models import END_ID, PAD_ID, VOCAB_SIZE, make_tokenizer

from penstock.backends.checkpoint.terminal import quiet_transformers

models: Any = transformers
SIZES: dict[str, Any] = {
    "vocab_size": 101,  # a prime, so that it is filled up under any layout
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
}  # fmt: skip

CONFIGS: dict[str, Any] = {
    "qwen2": models.Qwen2Config(**SIZES),
    "qwen3": models.Qwen3Config(**SIZES, head_dim=24),
    "qwen3 tied": models.Qwen3Config(**SIZES | {"tie_word_embeddings": True}, head_dim=16),
    "qwen3_moe": models.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16),
    "qwen3_moe mixed": models.Qwen3MoeConfig(
        **SIZES, **EXPERTS | {"norm_topk_prob": False}, head_dim=16, mlp_only_layers=[1, 2]
    ),
    "llama": models.LlamaConfig(**SIZES),
    "llama scaled": models.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "glm4": models.Glm4Config(**SIZES, head_dim=16, attention_bias=True, pad_token_id=None),
    "deepseek_v3": models.DeepseekV3Config(
        **SIZES | LATENT,
        q_lora_rank=24,
        rope_parameters=YARN,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        n_shared_experts=2,
    ),
    "deepseek_v3 plain": models.DeepseekV3Config(
        **SIZES | LATENT,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=3,
        n_shared_experts=1,
        rms_norm_eps=1e-3,
        routed_scaling_factor=2.446,
    ),
}


GLM45: dict[str, Any] = {
    "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5, "num_mtp_layers": 1,
}  # fmt: skip
CONFIGS.update(
    {
        "glm4_moe_lite": models.Glm4MoeLiteConfig(
            **SIZES | {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            q_lora_rank=24,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            n_shared_experts=1,
            routed_scaling_factor=1.8,
        ),
        "glm4_moe": models.Glm4MoeConfig(**SIZES, **GLM45, attention_bias=True, use_qk_norm=True),
        "glm4_moe air": models.Glm4MoeConfig(**SIZES, **GLM45 | {"n_shared_experts": 2}, first_k_dense_replace=2),
    }
)


def has_experts(name: str) -> bool:
    return "moe" in name or "deepseek" in name


def make_tiny(name: str, folder: Path) -> Path:
    """Write a model whose weights all differ: norms away from 1 and biases from 0, so that a mix-up shows."""
    return _write(CONFIGS[name], folder)


def make_served(name: str, folder: Path, **published: object) -> Path:
    """The same with a vocabulary of words and its tokenizer, for a whole run; what is ``published`` stands in the
    ``config.json`` as well, without transformers knowing it."""
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size, config.eos_token_id, config.pad_token_id = VOCAB_SIZE, END_ID, PAD_ID
    _write(config, folder)
    make_tokenizer().save_pretrained(str(folder))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | published))
    return folder


def _write(config: Any, folder: Path) -> Path:  # noqa: ANN401 - a config of transformers
    torch.manual_seed(3)
    model = models.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer in (buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")):
            buffer.copy_(0.05 * torch.randn_like(buffer))
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder


def make_predicting(name: str, folder: Path, *, num_further: int = 1, is_served: bool = False) -> Path:
    """One with layers that predict further tokens, as DeepSeek-V3 and GLM-4.5 are published: layers like the model's
    last one beyond those that ``config.json`` counts, what is around them, and copies of embedding and output head.
    The ``whole`` folder in it is the model that has them as its own last layers. One that ``is_served`` has a
    vocabulary of words and its tokenizer."""
    config = copy.deepcopy(CONFIGS[name])
    if is_served:
        config.vocab_size, config.eos_token_id, config.pad_token_id = VOCAB_SIZE, END_ID, PAD_ID
    num_layers = config.num_hidden_layers
    config.num_hidden_layers = num_layers + num_further
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*config.mlp_layer_types, *["sparse"] * num_further][: config.num_hidden_layers]
    whole = _write(config, folder / "whole")
    tensors = load_file(whole / "model.safetensors")
    hidden = config.hidden_size
    torch.manual_seed(4)
    for layer in range(num_layers, num_layers + num_further):
        prefix = f"model.layers.{layer}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + 0.1 * torch.randn(hidden)
        tensors[f"{prefix}eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden)
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((whole / "config.json").read_bytes())
    said |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_further}
    if said.get("mlp_layer_types"):
        said["mlp_layer_types"] = said["mlp_layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(said))
    if is_served:
        make_tokenizer().save_pretrained(str(folder))
    return folder


def load_tiny(folder: Path) -> Any:  # noqa: ANN401 - a model of transformers
    """The model in transformers, ready to be asked."""
    with quiet_transformers():
        return models.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
