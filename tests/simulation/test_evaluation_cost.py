"""Evaluation beside training on the virtual clock: what it costs, exactly."""

from __future__ import annotations

import pytest

from penstock.benchmarks.evaluation import BINDS, virtual_cost

STEPS = 28
"""One evaluation, asked at step 20 and over before the last."""


@pytest.mark.parametrize("binds", BINDS)
def test_evaluation_costs_training_little_more_than_its_tokens(binds: str) -> None:
    cost = virtual_cost(binds, seed=1, num_steps=STEPS)
    assert cost.evaluating.num_evaluations == 1
    assert cost.evaluating.evaluated_tokens > 0
    assert cost.evaluating.trained_tokens == cost.without.trained_tokens  # training samples the same, token for token
    assert cost.beyond_tokens < 0.1
