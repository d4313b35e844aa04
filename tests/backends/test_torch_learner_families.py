"""Families of models in the torch learner: packed, their tokens have the log-probs that transformers gives them alone;
and those whose attention packing cannot compute, or that mix tokens outside of it, are refused."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.torch.model import PackedModel
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

models: Any = transformers
CPU = torch.device("cpu")
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
TAKEN: dict[str, Any] = {
    "llama": lambda: models.LlamaConfig(**SIZES),
    "mistral": lambda: models.MistralConfig(**SIZES),
    "qwen2": lambda: models.Qwen2Config(**SIZES),
    "qwen3": lambda: models.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: models.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gemma3_text": lambda: models.Gemma3TextConfig(**SIZES, sliding_window=8),
    "phi3": lambda: models.Phi3Config(**SIZES),
    "glm4": lambda: models.Glm4Config(**SIZES),
    "glm4_moe": lambda: models.Glm4MoeConfig(**SIZES, **DEEPSEEK, use_qk_norm=True),
    "glm4_moe_lite": lambda: models.Glm4MoeLiteConfig(**SIZES | LATENT),
    "deepseek_v3": lambda: models.DeepseekV3Config(**SIZES | LATENT, first_k_dense_replace=1),
    "minimax_m2": lambda: models.MiniMaxM2Config(**SIZES, num_local_experts=8, num_experts_per_tok=2),
}
REFUSED: dict[str, Any] = {
    "gpt_oss": lambda: models.GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=8),
    "mimo_v2_flash": lambda: models.MiMoV2FlashConfig(**SIZES | {"v_head_dim": 12} | DEEPSEEK),
    "qwen3_next": lambda: models.Qwen3NextConfig(**SIZES, **NEXT),
    "qwen3_5_text": lambda: models.Qwen3_5TextConfig(**SIZES, **{k: v for k, v in NEXT.items() if "linear" in k}),
}


REASONS = {
    "gpt_oss": "GptOssAttention needs attention with s_aux, which packed training lacks",
    "mimo_v2_flash": "MiMoV2FlashAttention needs attention with s_aux, which packed training lacks",
    "qwen3_next": "the log-probs of a sequence change by",
    "qwen3_5_text": "the log-probs of a sequence change by",
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


@pytest.mark.parametrize("family", TAKEN)
def test_packed_tokens_have_the_logprobs_of_each_sequence_alone(family: str, tmp_path: Path) -> None:
    folder = made(TAKEN[family](), tmp_path)
    packed = PackedModel.load(folder, dtype="float32", device=CPU)
    drawn = np.random.default_rng(4)
    rows = [drawn.integers(2, 101, length).tolist() for length in (9, 30, 5, 14)]
    sequences = [demonstration_sequence(row[:2], row[2:], sample=number) for number, row in enumerate(rows)]
    with torch.no_grad():
        found = packed.scores(pack(sequences), temperature=1.0, entropy_gradient=False).logprobs
    with quiet_transformers():
        plain = models.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    wanted: list[torch.Tensor] = []
    for row in rows:
        with torch.no_grad():
            logprobs = plain(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        wanted.append(logprobs.gather(1, torch.tensor(row[1:])[:, None])[1:, 0])
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_packed_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=REASONS[family]):
        PackedModel.load(made(REFUSED[family](), tmp_path), dtype="float32", device=CPU)
