"""A model that ranks read in shares has the bits of one that they read whole and then divide."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_load_cases import Loaded, first_step, load_both
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_cases import Ranks

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
pytestmark = pytest.mark.long_run

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "tie_word_embeddings": False,
}  # fmt: skip
WEIGHTS = "model.safetensors"
UNEVEN = 3


def saved(folder: Path, config: object, **keys: object) -> Path:
    torch.manual_seed(5)
    AutoModel.from_config(config).save_pretrained(folder, **keys)
    return folder


def assert_same_bits(found: list[Loaded]) -> None:
    for loaded in found:
        assert loaded.shares.keys() == loaded.expected.keys()
        for name, tensor in loaded.expected.items():
            assert loaded.shares[name].dtype == tensor.dtype, name
            assert torch.equal(loaded.shares[name], tensor), name


CASES: dict[str, Any] = {
    "tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "untied, scaled rotary positions": LlamaConfig(
        **SIZES,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    ),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "a computed scale": Gemma3TextConfig(**SIZES, head_dim=8),
    "a stored buffer in float32": Glm4MoeConfig(**SIZES, **ROUTED),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_shares_have_the_bits_of_the_whole(case: str, dtype: str, tmp_path: Path, ranks: Ranks) -> None:
    """Rows are 37, 22, 16 and 5, so none is divided evenly by three."""
    folder = saved(tmp_path, CASES[case], max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    found = ranks.run(UNEVEN, load_both, folder, dtype)
    assert_same_bits(found)
    assert not any(loaded.warnings for loaded in found)
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    buffers = [tensor.numel() for name, tensor in stored.items() if name in found[0].shares and "_bias" in name]
    # Each element once, by the rank whose it is, but for buffers, which every rank has.
    num_stored = sum(tensor.numel() for tensor in stored.values())
    assert sum(loaded.num_read for loaded in found) == num_stored + (UNEVEN - 1) * sum(buffers)
    assert max(loaded.num_read for loaded in found) < 0.45 * num_stored


STEPPED: dict[str, Any] = {
    "tied": CASES["tied"],
    "scores that are bent": Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=2.0, sliding_window=4),
    "rows that are padded": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("shard_size", [None, 2])
@pytest.mark.parametrize("case", STEPPED)
def test_loss_and_gradient_on_four_ranks_are_those_of_one(
    case: str, shard_size: int | None, tmp_path: Path, ranks: Ranks
) -> None:
    """In shares of four, and as two copies in shares of two."""
    folder = saved(tmp_path, STEPPED[case])
    (alone,) = ranks.run(1, first_step, folder)
    for found in ranks.run(4, first_step, folder, shard_size):
        assert found.figures == pytest.approx(alone.figures, abs=1e-5, rel=1e-5)
        assert alone.gradient.abs().max() > 1e-3
        torch.testing.assert_close(found.gradient, alone.gradient, rtol=1e-4, atol=1e-6)


def test_adapters_get_the_random_numbers_that_they_had(tmp_path: Path, ranks: Ranks) -> None:
    folder = saved(tmp_path, CASES["tied"])
    found = ranks.run(2, load_both, folder, "bfloat16", with_adapters=True)
    assert_same_bits(found)
    assert sum("lora_" in name for name in found[0].shares) > 0
    assert not any(loaded.warnings for loaded in found)


def test_tied_weights_that_lie_under_the_other_name(tmp_path: Path, ranks: Ranks) -> None:
    folder = saved(tmp_path, CASES["tied"])
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    found = ranks.run(2, load_both, folder, "float32")
    assert_same_bits(found)
    assert not any(loaded.warnings for loaded in found)


def tied_twice(folder: Path) -> None:
    saved(folder, CASES["tied"])
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def tied_with_other_values(folder: Path) -> None:
    tied_twice(folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] *= 2
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    saved(folder, CASES["tied"])
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def experts_of_other_names(folder: Path) -> None:
    saved(folder, MixtralConfig(**SIZES))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tied_twice, "it has both"),
        (tied_with_other_values, "it has both"),
        (pickled, "safetensors"),
        (experts_of_other_names, "makes several weights"),
    ],
)
def test_what_cannot_be_read_in_shares_is_read_whole(
    make: Callable[[Path], None], reason: str, tmp_path: Path, ranks: Ranks
) -> None:
    make(tmp_path)
    found = ranks.run(2, load_both, tmp_path, "float32")
    assert_same_bits(found)
    for loaded in found:
        assert len(loaded.warnings) == 1
        assert "every rank reads the whole model" in loaded.warnings[0]
        assert reason in loaded.warnings[0]
