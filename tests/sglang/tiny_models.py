"""Tiny checkpoints with random weights and a tokenizer of their own, which both transformers and SGLang load.

Made on the spot, nothing is downloaded: about 0.6 MB and a second each. The same arguments give the same weights, and
every seed has the same tokenizer and the same shapes, so that one may be loaded over the other.
"""

# transformers, tokenizers and torch.random are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal, TypedDict

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.backends.checkpoint.terminal import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


Architecture = Literal["qwen3", "llama", "qwen3_moe"]

VOCAB_SIZE: Final = 512
CONTEXT_TOKENS: Final = 2048
HEAD_SCALE: Final = 0.4
PAD_TOKEN: Final = "<|endoftext|>"
START_TOKEN: Final = "<|im_start|>"
END_TOKEN: Final = "<|im_end|>"
PAD_ID: Final = 0
START_ID: Final = 1
END_ID: Final = 2
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON_WORDS: Final = "one two three four add sub plus minus equals answer the sum of is x y z 1 2 3 4 5 6 7 8 9 0"


class _Shape(TypedDict):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    eos_token_id: int
    pad_token_id: int


SHAPE: Final = _Shape(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT_TOKENS,
    tie_word_embeddings=False,
    initializer_range=0.2,  # large enough that the likeliest token leads by more than rounding
    eos_token_id=END_ID,
    pad_token_id=PAD_ID,
)


def make_tiny_model(folder: Path, architecture: Architecture = "qwen3", *, seed: int = 0) -> Path:
    """Write a checkpoint in float32 and its tokenizer to ``folder``, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = _random_model(architecture)
        with torch.no_grad():
            # Log-probs of a trained model's size: a float32 has seven digits, and at −16 the last of them is 2e-6.
            model.lm_head.weight.mul_(HEAD_SCALE)
        assert model.generation_config is not None
        model.generation_config.eos_token_id = END_ID
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(str(folder))
    return folder


def _random_model(architecture: Architecture) -> Qwen3ForCausalLM | LlamaForCausalLM | Qwen3MoeForCausalLM:
    match architecture:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SHAPE))
        case "qwen3_moe":
            return Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    **SHAPE, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
                    decoder_sparse_step=1,
                )
            )  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the lines have enough different pairs to fill it"
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[START_TOKEN],
        model_max_length=CONTEXT_TOKENS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _lines(count: int = 2000) -> Iterator[str]:
    chance = random.Random(0)
    words = COMMON_WORDS.split()
    words += ["".join(chance.choice("abcdefghijklmnop") for _ in range(chance.randint(3, 7))) for _ in range(300)]
    for _ in range(count):
        yield " ".join(chance.choice(words) for _ in range(chance.randint(3, 12))) + "\n"
