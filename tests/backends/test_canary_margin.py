"""How far the canary of wrong weights is from what is allowed, and that of right ones."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import make_case, open_engine, weights_of

from penstock.backends.learners.canary import choose_canary
from penstock.backends.learners.torch.canary import canary_under
from penstock.backends.learners.torch.model import PackedModel
from penstock.messages.arrays import tokens_view
from penstock.messages.canary import canary_difference
from penstock.runtime.scenario.resolve import EXACT_CANARY_NATS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", ["qwen3_tied", "llama_untied"])
def test_any_two_swapped_weights_are_far_outside_and_right_ones_far_inside(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path)
    model = PackedModel.load(case.folder, dtype="float32", device=torch.device("cpu"))
    canary = canary_under(model, choose_canary(model))
    engine, right = open_engine(case), weights_of(case.model)

    def difference(weights: dict[str, torch.Tensor]) -> float:
        engine.load(weights, 1)
        return canary_difference(canary, engine.score(tokens_view(canary.tokens)).numpy().tobytes())

    assert difference(right) < EXACT_CANARY_NATS / 100
    swapped: list[float] = []
    for left, other in itertools.combinations(right, 2):
        if right[left].shape == right[other].shape and not torch.equal(right[left], right[other]):
            swapped.append(difference({**right, left: right[other], other: right[left]}))
    assert len(swapped) > 10
    assert min(swapped) > 3 * EXACT_CANARY_NATS
