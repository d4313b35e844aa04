"""Made models load everywhere, are reproducible, and their tokenizer loses nothing."""

# Torch and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.backends.checkpoint.make import CHARACTERS, END_ID, PAD_ID, SHAPES, character_tokenizer, make_model

if TYPE_CHECKING:
    from pathlib import Path

# transformers' factories have no types
AutoModel: Any = AutoModelForCausalLM
AutoTokens: Any = AutoTokenizer


@pytest.mark.parametrize(
    ("size", "num_parameters"), [("xs", 103_808), ("s", 303_360), ("m", 797_952), ("moe_xs", 191_296)]
)
def test_each_size_loads_in_transformers(size: str, num_parameters: int, tmp_path: Path) -> None:
    make_model(size, tmp_path / "model", seed=0)  # type: ignore[arg-type]  # one of the literals
    model = AutoModel.from_pretrained(tmp_path / "model")
    config, shape = model.config, SHAPES[size]  # type: ignore[index]
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert (config.model_type, config.tie_word_embeddings) == (
        ("qwen3", True) if shape.experts is None else ("qwen3_moe", False)
    )
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (shape.hidden, shape.layers, 32)
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.max_position_embeddings == 512
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (79, 0, 1)


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(hash(name) % 1000)
        make_model("xs", tmp_path / name, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_model("xs", tmp_path, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one of xs, s, m, moe_xs, vlm_xs, got 'xl'"):
        make_model("xl", tmp_path, seed=0)  # type: ignore[arg-type]


def test_both_loaders_agree_and_round_trip(tmp_path: Path) -> None:
    make_model("xs", tmp_path, seed=0)
    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    slow = AutoTokens.from_pretrained(tmp_path)
    text = "dbacC=AabcdBabcd  \n x-1?" + CHARACTERS
    ids = fast.encode(text).ids
    assert slow(text)["input_ids"] == ids
    assert len(ids) == len(text)
    assert fast.decode(ids) == slow.decode(ids) == text
    assert fast.decode([*ids, END_ID]) == text
    assert (slow.pad_token_id, slow.eos_token_id) == (PAD_ID, END_ID)


@given(st.text(alphabet=CHARACTERS))
def test_what_is_encoded_comes_back(text: str) -> None:
    tokenizer = character_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_character_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(Exception, match="UNK"):
        character_tokenizer().encode("a_b")
