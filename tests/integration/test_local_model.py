"""A checkpoint folder that transformers wrote, on a JSONL file that is not ours, with a reward of the user's own."""

# pyright: reportUnknownMemberType=false
# transformers and torch leave parts of their types open.
from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from live_run import LiveRun
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

REWARD = """
def reward(prompt: str, response: str, label: str) -> dict[str, float]:
    digits = sum(character.isdigit() for character in response)
    return {"reward": digits / max(1, len(response)), "right": float(response.startswith(label))}
"""


def write_checkpoint(folder: Path) -> None:
    """A small Llama and its tokenizer, as ``save_pretrained`` leaves them."""
    alphabet = ["<pad>", "</s>", *"0123456789+-= abcdefghijklmnopqrstuvwxyz?"]
    tokenizer = Tokenizer(WordLevel({symbol: index for index, symbol in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_the_saved_result_of_a_local_model_loads_in_transformers(tmp_path: Path) -> None:
    model, rows, reward = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "mine.py"
    write_checkpoint(model)
    reward.write_text(REWARD)
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(64)))
    overrides = (
        f"model.path={model}",
        f"data.path={rows}",
        f"reward.function={reward}:reward",
        "model.max_context=64",
        "sampling.max_response_tokens=24",
        "learner.groups_per_batch=4",
        "learner.learning_rate=1e-3",
        "run.num_steps=4",
    )
    parent = tmp_path / "runs"
    parent.mkdir()
    with LiveRun("local_model.yaml", parent, overrides) as run:
        summary = run.finish()
    assert summary.checkpoint
    trained = AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    before = AutoModelForCausalLM.from_pretrained(model)
    assert isinstance(trained, LlamaForCausalLM)
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert any(moved), "training has left the weights as they were"
    assert AutoTokenizer.from_pretrained(summary.checkpoint)("1+1=").input_ids
