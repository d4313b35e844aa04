"""A reward model with planted weights whose score has a closed form: how much of a text is one letter.

Attention looks at all tokens alike, as its queries are 0, and carries the share of the letter to the last token, where
the head reads it.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from penstock.backends.checkpoint.characters import END_TOKEN, PAD_ID, PAD_TOKEN, SYMBOLS, character_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = 16
EPSILON = 1e-6
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def plant_reward_model(folder: Path, letter: str, *, factor: float = 1.0, template: str | None = TEMPLATE) -> None:
    """Write one whose score is about ``factor`` times the share of this letter."""
    known: Any = Qwen3Config
    config = known(
        vocab_size=len(SYMBOLS),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN,
        max_position_embeddings=512,
        rms_norm_eps=EPSILON,
        num_labels=1,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
    )
    build: Any = Qwen3ForSequenceClassification
    model = build(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        embedded, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        embedded[:, 0] = 1.0
        embedded[SYMBOLS.index(letter), 1] = 1.0
        attention.v_proj.weight[2, 1] = 1.0
        attention.o_proj.weight[2, 2] = 1.0
        model.score.weight[0, 2] = factor
    model.save_pretrained(folder)
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=character_tokenizer(), pad_token=PAD_TOKEN, eos_token=END_TOKEN, model_max_length=512
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def planted_score(text: str, letter: str, factor: float = 1.0) -> float:
    """What the planted model says of a text, by hand."""
    normed = math.sqrt(HIDDEN / 2)  # of a letter's two features, once they are normed
    share = normed * sum(character == letter for character in text) / len(text)
    last = 2.0 if text[-1] == letter else 1.0
    return factor * share / math.sqrt((last + share**2) / HIDDEN + EPSILON)
