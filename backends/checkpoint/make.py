"""Small models made on the spot: a Qwen3, Qwen3-MoE or Qwen2.5-VL with random weights and a character tokenizer, in
Hugging Face format.

Invariants:

* The same size and seed give the same bytes of weights; torch's global random state is left as it was.
"""

# transformers and torch.random are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.backends.checkpoint.characters import (
    CHARACTERS,
    CHAT_TEMPLATE,
    CONTEXT_TOKENS,
    END_ID,
    END_TOKEN,
    PAD_ID,
    PAD_TOKEN,
    SYMBOLS,
    character_tokenizer,
)
from penstock.backends.checkpoint.options import SEEING_MODEL, ModelSize
from penstock.backends.checkpoint.terminal import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

__all__ = [
    "CHARACTERS",
    "CONTEXT_TOKENS",
    "END_ID",
    "END_TOKEN",
    "PAD_ID",
    "PAD_TOKEN",
    "SHAPES",
    "SYMBOLS",
    "ExpertShape",
    "ModelShape",
    "ModelSize",
    "character_tokenizer",
    "make_model",
    "write_made_model",
]


class ExpertShape(NamedTuple):
    """The experts in place of each layer's MLP."""

    num_experts: int
    per_token: int
    intermediate: int


class ModelShape(NamedTuple):
    """The dimensions of one size."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: ExpertShape | None = None


SHAPES: Final[dict[ModelSize, ModelShape]] = {
    "xs": ModelShape(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=192),
    "s": ModelShape(hidden=96, layers=3, heads=3, kv_heads=1, head_dim=32, intermediate=256),
    "m": ModelShape(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=384),
    "moe_xs": ModelShape(
        hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate=192,
        experts=ExpertShape(num_experts=4, per_token=2, intermediate=96),
    ),
}  # fmt: skip


def make_model(size: ModelSize, folder: Path, seed: int) -> None:
    """Write a model with random weights and its tokenizer to ``folder``, which is made if it is missing.

    Raises:
        ValueError: there is no such size.
    """
    if size not in get_args(ModelSize):
        raise ValueError(f"model size: expected one of {', '.join(get_args(ModelSize))}, got {size!r}")
    if size != SEEING_MODEL:
        write_made_model(SHAPES[size], folder, seed)
        return
    from penstock.backends.checkpoint.make_vision import PATCH_SIZE  # wants Pillow

    write_seeing_model(folder, seed, patch_size=PATCH_SIZE)


def write_seeing_model(folder: Path, seed: int, *, patch_size: int) -> None:
    """Write a model that sees, with patches of so many pixels, its tokenizer and its image processor."""
    from penstock.backends.checkpoint.make_vision import random_vision_model, write_image_processor

    _save(lambda: random_vision_model(patch_size), folder, seed)
    tokenizer = _fast_tokenizer(sees=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    write_image_processor(folder, patch_size)
    tokenizer.save_pretrained(str(folder))


def write_made_model(shape: ModelShape, folder: Path, seed: int) -> None:
    """Write a model that sees nothing, of these dimensions, and its tokenizer; see :func:`make_model`."""
    _save(lambda: _random_model(shape), folder, seed)
    _fast_tokenizer(sees=False).save_pretrained(str(folder))


def _save(make: Callable[[], PreTrainedModel], folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    with quiet_transformers():
        model.save_pretrained(folder)


def _fast_tokenizer(*, sees: bool) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=character_tokenizer(sees=sees),
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _random_model(shape: ModelShape) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    common: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "pad_token_id": PAD_ID,
        "eos_token_id": END_ID,
    }
    if shape.experts is None:
        return Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common,
            tie_word_embeddings=False,  # as the published ones, and not every server ties these
            num_experts=shape.experts.num_experts,
            num_experts_per_tok=shape.experts.per_token,
            moe_intermediate_size=shape.experts.intermediate,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
    )
