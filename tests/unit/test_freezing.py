"""Which weights ``learner.freeze`` and ``learner.train_only`` name, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.training.freezing import frozen_weights, wrong_pattern
from penstock.messages.errors import UserFault
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.freeze_rules import freeze_rules
from penstock.runtime.scenario.rules import RULES

QKV = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
WEIGHTS = {
    "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
    "decoder.layers.0.self_attention.linear_qkv.weight": QKV,
    "decoder.layers.0.mlp.linear_fc2.weight": ["model.layers.0.mlp.down_proj.weight"],
    "output_layer.weight": ["lm_head.weight"],
}
EMBEDDING, ATTENTION, DOWN, HEAD = WEIGHTS


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (("embed_tokens",), {EMBEDDING}),
        (("embedding", "output_layer"), {EMBEDDING, HEAD}),
        ((r"layers\.0\.",), {ATTENTION, DOWN}),
        (("linear_qkv",), {ATTENTION}),
        (("q_proj", "k_proj", "v_proj"), {ATTENTION}),
        (("^lm_head",), {HEAD}),
    ],
)
def test_a_pattern_is_looked_for_in_both_names(patterns: tuple[str, ...], named: set[str]) -> None:
    assert frozen_weights(LearnerOptions(freeze=patterns), WEIGHTS) == named
    assert frozen_weights(LearnerOptions(train_only=patterns), WEIGHTS) == set(WEIGHTS) - named


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"freeze": ("embd_tokens",)}, "'embd_tokens' is in the name of no weight; the closest are model.embed_tokens"),
        ({"train_only": ("q_proj",)}, "name all of its tensors, or none"),
        ({"freeze": ("weight",)}, "learner.freeze: nothing is left to train, all 4 weights are frozen"),
    ],
)
def test_what_cannot_be_frozen_is_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserFault) as caught:
        frozen_weights(LearnerOptions(**keys), WEIGHTS)
    assert reason in str(caught.value)


def test_a_pattern_that_would_be_looked_for_for_ever_is_refused() -> None:
    for pattern in ("(a+)+$", "(?:a|a){2,}", "*.weight", ".*.*.*.*"):
        assert wrong_pattern(pattern) is not None
    slowest = ".*[a-z]*.*!"
    assert wrong_pattern(slowest) is None
    begin = time.perf_counter()
    with pytest.raises(UserFault, match="in the name of no weight"):
        frozen_weights(LearnerOptions(freeze=(slowest,)), {"w": ["a" * 80]})
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("learner", "key", "reason"),
    [
        ({"freeze": ["a"], "train_only": ["b"]}, "train_only", "the other way round"),
        ({"freeze": ["a"], "lora": {}}, "freeze", "learner.lora trains adapters"),
        ({"train_only": ["a"], "backend": "simulated"}, "train_only", "a simulated learner has no weights"),
        ({"freeze": ["*a"]}, "freeze", "is no regular expression"),
    ],
)
def test_rules(learner: dict[str, Any], key: str, reason: str) -> None:
    data = {
        "run": {"name": "rules"},
        "model": {"make": "xs"},
        "data": {"path": "lines:100"},
        "reward": {"function": "lines"},
        "sampling": {"max_response_tokens": 64},
        "learner": learner,
    }
    found = next(freeze_rules(msgspec.convert(data, Scenario)))
    assert found[0] == ("learner", key)
    assert reason in found[1]
    assert freeze_rules in RULES
