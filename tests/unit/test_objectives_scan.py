"""The scan behind GAE and discounted returns against the recurrences as the papers write them."""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_objectives import generalized_advantages

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.advantages import (
    generalized_token_advantages,
)
from penstock.backends.learners.objectives.scan import reverse_recurrence
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates

if TYPE_CHECKING:
    from collections.abc import Sequence

Factor = st.sampled_from((0.0, 0.5, 0.9, 0.99, 1.0))


def draws(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[float], discount: float, trace: float
) -> list[float]:
    found, following, next_value = [0.0] * len(rewards), 0.0, 0.0
    for place in reversed(range(len(rewards))):
        if mask[place]:
            error = rewards[place] + discount * next_value - values[place]
            found[place] = following = error + discount * trace * following
            next_value = values[place]
    return found


def plain_returns(rewards: Sequence[float], discount: float) -> list[float]:
    found, following = [0.0] * len(rewards), 0.0
    for place in reversed(range(len(rewards))):
        found[place] = following = rewards[place] + discount * following
    return found


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0),
    seed=st.integers(0, 1000),
    discount=Factor,
    trace=Factor,
)
def test_samples_end_to_end_have_the_advantages_of_each_alone(
    sizes: list[int], seed: int, discount: float, trace: float
) -> None:
    rewards, values = draws(seed, sum(sizes)), draws(seed + 1, sum(sizes))
    found = generalized_token_advantages(rewards, values, torch.tensor(sizes), discount=discount, trace=trace)
    expected: list[float] = []
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        expected += plain_gae(rewards[part].tolist(), values[part].tolist(), [1.0] * size, discount, trace)
        start += size
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(rows=st.integers(1, 4), width=st.integers(1, 70), seed=st.integers(0, 1000), discount=Factor, trace=Factor)
def test_tables_with_a_mask_have_the_plain_recurrences(
    rows: int, width: int, seed: int, discount: float, trace: float
) -> None:
    mask = (draws(seed + 2, rows * width) > 0).double().view(rows, width)
    rewards, values = draws(seed, rows * width).view(rows, width) * mask, draws(seed + 1, rows * width).view(rows, -1)
    found = generalized_advantages(rewards, values, mask, discount=discount, trace=trace).advantages
    for row in range(rows):
        one = rewards[row].tolist()
        expected = plain_gae(one, values[row].tolist(), mask[row].tolist(), discount, trace)
        assert found[row].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(max_examples=40)
@given(
    places=st.lists(st.sets(st.integers(0, 40), min_size=1), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    discount=Factor,
)
def test_tokens_in_any_order_get_the_estimates_of_their_own_sample(
    places: list[set[int]], seed: int, discount: float
) -> None:
    tokens = [(sample, place) for sample, found in enumerate(places) for place in found]
    random.Random(seed).shuffle(tokens)
    samples = Segments(torch.tensor([sample for sample, _ in tokens]), len(places))
    rewards, kl, values = draws(seed, len(places)), draws(seed + 1, len(tokens)), draws(seed + 2, len(tokens))
    given_samples = RewardedSamples(
        rewards, torch.zeros(len(places), dtype=torch.int64), samples, torch.tensor([place for _, place in tokens])
    )
    gae = objective("ppo", discount=discount, gae_lambda=0.9, kl_coef=0.1)
    returns = objective("reinforce_plus_plus", discount=discount, kl_coef=0.1, whiten=False)
    estimated = token_estimates(given_samples, gae, kl=kl, values=values).advantages
    discounted = token_estimates(given_samples, returns, kl=kl).advantages
    for sample, found in enumerate(places):
        number = {place: tokens.index((sample, place)) for place in sorted(found)}
        row, row_values, mask = [0.0] * 41, [0.0] * 41, [0.0] * 41
        for place, token in number.items():
            row[place] = -0.1 * float(kl[token]) + (float(rewards[sample]) if place == max(found) else 0.0)
            row_values[place], mask[place] = float(values[token]), 1.0
        expected_gae = plain_gae(row, row_values, mask, discount, 0.9)
        # What the model did not write takes no time, neither here nor there.
        expected_returns = plain_returns([row[place] for place in number], discount)
        for (place, token), expected in zip(number.items(), expected_returns, strict=True):
            assert float(estimated[token]) == pytest.approx(expected_gae[place], rel=1e-6, abs=1e-6)
            assert float(discounted[token]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_long_response_loses_no_digits() -> None:
    size = 32_768
    rewards, values = torch.zeros(size, dtype=torch.float64), draws(3, size)
    rewards[-1] = 1.0
    for discount, trace in ((1.0, 1.0), (1.0, 0.95), (0.999, 0.95)):
        found = generalized_token_advantages(rewards, values, torch.tensor([size]), discount=discount, trace=trace)
        expected = plain_gae(rewards.tolist(), values.tolist(), [1.0] * size, discount, trace)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_recurrence_does_not_change_what_it_is_given() -> None:
    inputs, factors = draws(0, 9), draws(1, 9)
    kept = inputs.clone(), factors.clone()
    reverse_recurrence(inputs, factors, longest=9)
    assert torch.equal(inputs, kept[0])
    assert torch.equal(factors, kept[1])
