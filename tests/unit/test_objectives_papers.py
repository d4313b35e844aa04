"""SAPO, GMPO, MaxRL, GDPO, VAPO and the KL to the behaviour policy, as loops over padded rows that are written from the
formulas of the papers, against the functions that both learners call."""

# Tensor.tolist and NumPy are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from padded_objectives import generalized_advantages

from penstock.backends.learners.batch.components import component_rewards
from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.advantages import (
    decoupled_advantages,
    group_normalized_advantages,
    length_adaptive_trace,
    mean_normalized_advantages,
)
from penstock.backends.learners.objectives.objective import policy_objective
from penstock.backends.learners.objectives.policy_loss import geometric_mean_loss, reduction_weights, soft_gated_loss
from penstock.backends.learners.objectives.protocol import PolicyTokens
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates
from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, CountedSample, Group, Loss, Prompt, Reward, Sample, SampleKey

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.options import ObjectiveOptions

SIZES = (5, 1, 3, 4)
"""Trained tokens of each response."""
ROWS = torch.tensor([row for row, size in enumerate(SIZES) for _ in range(size)])


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NEW, OLD = drawn(0, 0.5) - 1.5, drawn(1, 0.5) - 1.5
BY_RESPONSE = torch.tensor([0.7, -1.2, -0.4, 1.5], dtype=torch.float64)


def loss_and_gradient(options: ObjectiveOptions, advantages: Tensor, rollout: Tensor = OLD) -> tuple[float, Tensor]:
    """Of the product's objective on these tokens."""
    logprobs = NEW.clone().requires_grad_()
    weights = reduction_weights(options.reduction, torch.tensor(SIZES).double(), constant_tokens=40)[ROWS]
    nothing = torch.zeros_like(NEW)
    tokens = PolicyTokens(
        logprobs, nothing, rollout, None, advantages, weights, weights, nothing.long(), Segments(ROWS, len(SIZES))
    )
    loss = policy_objective(tokens, options).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), gradient


def padded(values: Tensor) -> list[list[Tensor]]:
    """Row by row, each number on its own."""
    return [list(values[row == ROWS].unbind()) for row in range(len(SIZES))]


def by_the_paper(loss: Any, *columns: Tensor) -> tuple[float, Tensor]:  # noqa: ANN401 - a function of padded rows
    logprobs = NEW.clone().requires_grad_()
    value = loss(padded(logprobs), *(padded(column) for column in columns))
    (gradient,) = torch.autograd.grad(value, logprobs)
    return float(value.detach()), gradient


# --- SAPO, 2511.20347 ---------------------------------------------------------------------------------------------


def sapo(new: list[list[Tensor]], old: list[list[Tensor]], advantages: list[list[Tensor]]) -> Tensor:
    """The mean over responses of each one's mean of ``f(r) · A``."""
    responses: list[Tensor] = []
    for row in range(len(new)):
        gated: list[Tensor] = []
        for n, o, a in zip(new[row], old[row], advantages[row], strict=True):
            tau = 0.8 if a > 0 else 1.3
            gated.append(4 / tau / (1 + torch.exp(-tau * (torch.exp(n - o) - 1))) * a)
        responses.append(torch.stack(gated).mean())
    return -torch.stack(responses).mean()


def test_sapo_is_its_formula() -> None:
    for advantages in (BY_RESPONSE[ROWS], drawn(2)):  # by response as in the paper, and by token
        found = loss_and_gradient(objective("sapo", tau_pos=0.8, tau_neg=1.3), advantages)
        expected = by_the_paper(sapo, OLD, advantages)
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        torch.testing.assert_close(found[1], expected[1])


def test_sapo_has_the_golden_values() -> None:
    """``4 / τ · σ(τ (r − 1))`` at r = 1, 2 and ½ by hand: σ(1) = 0.7310586, σ(−½) = 0.3775407, σ(1.05) = 0.7407749,
    σ(−0.525) = 0.3716837."""
    old = torch.zeros(6)
    new = torch.tensor([1.0, 2.0, 0.5] * 2).log()
    advantages = torch.tensor([1.0] * 3 + [-1.0] * 3)
    found = soft_gated_loss(new, old, advantages, tau_pos=1.0, tau_neg=1.05)
    expected = [-2.0, -2.924234, -1.510163, 1.904762, 2.821999, 1.415938]
    torch.testing.assert_close(found.loss, torch.tensor(expected), atol=1e-5, rtol=0.0)


def test_the_gate_of_sapo_is_open_where_nothing_moved_and_bounds_every_gradient() -> None:
    """Its gradient is ``r · sech²(τ (r − 1) / 2) · A`` , which has its largest value near r = 2."""
    new = torch.linspace(-20, 20, 4001, dtype=torch.float64).requires_grad_()
    for sign in (1.0, -1.0):
        found = soft_gated_loss(new, torch.zeros(4001).double(), sign * torch.ones(4001), tau_pos=1.0, tau_neg=1.05)
        (gradient,) = torch.autograd.grad(found.loss.sum(), new)
        tau = 1.0 if sign > 0 else 1.05
        ratio = new.detach().exp()
        expected = -sign * ratio / torch.cosh((tau * (ratio - 1) / 2).clamp(max=300)) ** 2
        torch.testing.assert_close(gradient[1:-1], expected[1:-1])
        assert 1.5 < float(gradient.abs().max()) < 1.6
        assert float(gradient[2000]) == pytest.approx(-sign)  # ratio 1
        assert float(found.clipped[2000]) == pytest.approx(0.0, abs=1e-12)
        assert float(found.clipped[-1]) == 1.0


# --- GMPO, 2507.20673 ---------------------------------------------------------------------------------------------


def gmpo(new: list[list[Tensor]], old: list[list[Tensor]], advantages: list[list[Tensor]]) -> Tensor:
    """``(Π_t |min(w^sgn, clip(w^sgn, e^-ε, e^ε))|^sgn)^(1 / |o|) · A``, the mean over responses."""
    low, high = math.exp(-0.3), math.exp(0.3)
    responses: list[Tensor] = []
    for row in range(len(new)):
        sign = float(advantages[row][0].sign())
        product = torch.ones((), dtype=torch.float64)
        for n, o in zip(new[row], old[row], strict=True):
            power = torch.exp(n - o) ** sign
            product = product * torch.minimum(power, power.clamp(low, high)) ** sign
        responses.append(product ** (1 / len(new[row])) * advantages[row][0])
    return -torch.stack(responses).mean()


def test_gmpo_is_its_formula() -> None:
    options = objective("gmpo", clip_low=0.3, clip_high=0.3)
    found = loss_and_gradient(options, BY_RESPONSE[ROWS])
    expected = by_the_paper(gmpo, OLD, BY_RESPONSE[ROWS])
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1])
    assert bool((expected[1] == 0).any()), "some tokens are clipped"
    assert bool((expected[1] != 0).any())


def test_gmpo_has_the_golden_values_on_both_sides() -> None:
    """d = (0.6, −0.2) and (−0.6, 0.2), bounded at 0.4 above for A > 0, and at −0.3 below for A < 0."""
    sequences = Segments(torch.tensor([0, 0, 1, 1]), 2)
    new = torch.tensor([0.6, -0.2, -0.6, 0.2])
    found = geometric_mean_loss(
        new, torch.zeros(4), torch.tensor([1.0, 1.0, -2.0, -2.0]), sequences, clip_low=0.3, clip_high=0.4
    )
    up, down = math.exp((0.4 - 0.2) / 2), math.exp((-0.3 + 0.2) / 2)
    torch.testing.assert_close(found.loss, torch.tensor([-up, -up, 2 * down, 2 * down]))
    assert found.clipped.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_gmpo_credits_each_token_with_its_own_advantage() -> None:
    new = torch.tensor([0.1, 0.2], dtype=torch.float64).requires_grad_()
    found = geometric_mean_loss(
        new, torch.zeros(2).double(), torch.tensor([1.0, -3.0]), Segments(torch.tensor([0, 0]), 1),
        clip_low=0.4, clip_high=0.4,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found.loss.sum(), new)
    torch.testing.assert_close(gradient, math.exp(0.15) * torch.tensor([-1.0, 3.0], dtype=torch.float64))


def test_a_token_without_advantage_is_neither_bounded_nor_trained() -> None:
    found = geometric_mean_loss(
        torch.tensor([3.0, -3.0]), torch.zeros(2), torch.zeros(2), Segments(torch.tensor([0, 0]), 1),
        clip_low=0.4, clip_high=0.4,
    )  # fmt: skip
    assert not found.loss.any()
    assert not found.clipped.any()


# --- KL to the behaviour policy, 2602.02276 -----------------------------------------------------------------------


@pytest.mark.parametrize("old", ["engine", "recompute"])
def test_the_kl_to_the_behaviour_policy_is_the_squared_log_ratio_to_what_drew_the_tokens(old: str) -> None:
    """Equation 1: ``− τ Σ (log π − log π_old)² / N``, whatever the ratio of the loss is taken to."""
    without = objective("dapo", old_logprobs=old)
    options = objective("dapo", old_logprobs=old, behaviour_kl_coef=0.3)
    advantages = drawn(2)
    plain, found = loss_and_gradient(without, advantages), loss_and_gradient(options, advantages)
    squares = [(n - o) ** 2 for n, o in zip(NEW.tolist(), OLD.tolist(), strict=True)]
    assert found[0] - plain[0] == pytest.approx(0.3 * sum(squares) / sum(SIZES), rel=1e-9)
    torch.testing.assert_close(found[1] - plain[1], 0.3 * 2 * (NEW - OLD) / sum(SIZES))


# --- MaxRL, 2602.02710 --------------------------------------------------------------------------------------------


def test_maxrl_has_the_golden_values() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.2, 0.6, 5.0])
    groups = torch.tensor([4] * 4 + [7] * 4 + [1] * 2 + [2] * 2 + [9] * 2 + [0])
    expected = [3.0, -1.0, -1.0, -1.0, 1 / 3, 1 / 3, 1 / 3, -1.0, 0.0, 0.0, 0.0, 0.0, -0.5, 0.5, 0.0]
    torch.testing.assert_close(mean_normalized_advantages(rewards, groups), torch.tensor(expected))


@pytest.mark.parametrize(("p", "size"), [(0.05, 4), (0.4, 5), (0.9, 8)])
def test_the_expected_gradient_of_maxrl_is_that_of_the_logarithm_to_order_n_less_1(p: float, size: int) -> None:
    """Theorem 5: ``E[Σ A_i S_i / n] = (1 − (1 − p)^(n − 1)) / p · p'``, over every outcome of n attempts, each right
    with the probability ``p = σ(θ)``: the score of one is ``r − p``, and ``p' = p (1 − p)``."""
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        chance = math.prod(p if r else 1 - p for r in outcome)
        found = mean_normalized_advantages(torch.tensor(outcome, dtype=torch.float64), torch.zeros(size).long())
        expected += chance * sum(a * (r - p) for a, r in zip(found.tolist(), outcome, strict=True)) / size
    assert expected == pytest.approx((1 - (1 - p) ** (size - 1)) / p * p * (1 - p), rel=1e-9)


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(UserFault, match=r"no reward may be negative; found -0\.5"):
        mean_normalized_advantages(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


# --- GDPO, 2601.05242 ---------------------------------------------------------------------------------------------


def gdpo(rewards: dict[int, list[list[float]]], weights: list[float]) -> list[list[float]]:
    """Group by group with loops: of each sample, in order."""
    sums: list[list[float]] = []
    for members in rewards.values():
        total = [0.0] * len(members)
        for k, weight in enumerate(weights):
            column = [member[k] for member in members]
            mean, std = float(np.mean(column)), float(np.std(column, ddof=1))
            total = [t + weight * (value - mean) / (std + 1e-6) for t, value in zip(total, column, strict=True)]
        sums.append(total)
    every = list(itertools.chain(*sums))
    mean, std = float(np.mean(every)), float(np.std(every, ddof=1))
    return [[(value - mean) / (std + 1e-6) for value in total] for total in sums]


def test_gdpo_is_its_formula() -> None:
    draw = torch.Generator().manual_seed(4)
    sizes, weights = {3: 4, 1: 2, 8: 5}, [1.0, 0.3, -0.5]
    rewards: dict[int, list[list[float]]] = {
        group: torch.rand(size, 3, generator=draw, dtype=torch.float64).tolist() for group, size in sizes.items()
    }
    ids = torch.tensor([group for group, size in sizes.items() for _ in range(size)])
    components = torch.tensor([member for members in rewards.values() for member in members], dtype=torch.float64)
    order = torch.randperm(len(ids), generator=draw)
    found = decoupled_advantages(
        components[order], torch.tensor(weights).double(), ids[order], torch.ones(len(ids)).bool(), normalize_std=True
    )
    expected = torch.tensor(list(itertools.chain(*gdpo(rewards, weights))), dtype=torch.float64)
    torch.testing.assert_close(found, expected[order], atol=1e-6, rtol=1e-6)


def test_gdpo_tells_apart_what_a_sum_of_rewards_does_not() -> None:
    """The example of the paper: sums of (0, 1) and (0, 2) have the same advantages under GRPO; here those of the second
    are twice as large. Spreads of 1/√2, so ±1/√2 and ±√2 before the batch's ``√(5/3)``."""
    components = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    groups, weights = torch.tensor([0, 0, 1, 1]), torch.ones(2).double()
    found = decoupled_advantages(components, weights, groups, torch.ones(4).bool(), normalize_std=True)
    half = math.sqrt(0.5) / math.sqrt(5 / 3)
    torch.testing.assert_close(found, torch.tensor([-half, half, -2 * half, 2 * half]).double(), atol=1e-5, rtol=0.0)
    collapsed = group_normalized_advantages(components.sum(dim=1), groups, normalize_std=True)
    torch.testing.assert_close(collapsed[:2], collapsed[2:], atol=1e-5, rtol=0.0)


def test_samples_without_trained_tokens_count_in_their_group_and_not_in_the_batch() -> None:
    components = torch.tensor([[0.0], [1.0], [5.0], [0.0], [4.0]], dtype=torch.float64)
    groups, is_trained = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, True, False, True, True])
    found = decoupled_advantages(components, torch.ones(1).double(), groups, is_trained, normalize_std=False)
    centred = np.asarray([-2.0, -1.0, 3.0, -2.0, 2.0])
    trained = centred[is_trained.numpy()]
    expected = (centred - trained.mean()) / (trained.std(ddof=1) + 1e-6)
    torch.testing.assert_close(found, torch.from_numpy(expected))
    nobody = decoupled_advantages(
        components, torch.ones(1).double(), groups, torch.zeros(5).bool(), normalize_std=False
    )  # fmt: skip
    assert not nobody.any()


def test_equal_components_give_exactly_no_advantage() -> None:
    components = torch.tensor([[0.1, 0.7]] * 3 + [[0.3, 1e6]] * 3, dtype=torch.float64)
    groups, trained = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6).bool()
    assert not decoupled_advantages(components, torch.ones(2).double(), groups, trained, normalize_std=True).any()


def sample(index: int, components: dict[str, float] | None) -> Sample:
    parts = tuple(Metric(name, value) for name, value in (components or {}).items())
    outcome = Completed(reward=None if components is None else Reward(value=1.0, components=parts))
    return Sample(
        key=SampleKey(7, index), parts=(), outcome=outcome,
        loss=Loss.SUPERVISED if components is None else Loss.OBJECTIVE,
    )  # fmt: skip


def group_of(*samples: Sample, counted: tuple[CountedSample, ...] = ()) -> Group:
    return Group(group_id=7, prompt=Prompt(row=0, epoch=0, tokens=b""), samples=samples, counted=counted)


def test_components_are_read_by_name_in_the_order_of_the_batch() -> None:
    dropped = CountedSample(3, 2.0, (Metric("b", 0.25), Metric("a", 0.5)))
    groups = [
        group_of(sample(0, {"a": 1.0, "b": 2.0}), sample(1, {"c": 9.0, "b": 4.0, "a": 3.0}), counted=(dropped,)),
        group_of(sample(0, None)),
    ]
    assert component_rewards(groups, ["b", "a"]).tolist() == [[2.0, 1.0], [4.0, 3.0], [0.25, 0.5], [0.0, 0.0]]
    assert component_rewards([], ["b", "a"]).shape == (0, 2)


@pytest.mark.parametrize(
    ("group", "story"),
    [
        (group_of(sample(2, {"b": 1.0, "c\x1b[2J": 2.0})), r"'a' of the reward of .* is missing; it has 'b', 'c\\x1b"),
        (group_of(sample(2, {})), "'a' of the reward of .* is missing; it has none"),
        (group_of(sample(2, {"a": math.nan})), "'a' of the reward of .* is nan"),
        (group_of(counted=(CountedSample(3, 1.0),)), "'a' of the reward of the dropped sample 3 of group 7 is missing"),
    ],
)
def test_a_reward_without_a_component_is_told_by_sample_and_name(group: Group, story: str) -> None:
    with pytest.raises(UserFault, match=rf"learner\.objective\.component_weights: the component {story}"):
        component_rewards([group], ["a"])


# --- VAPO, 2504.05118 ---------------------------------------------------------------------------------------------


def vapo(reward: float, values: list[float], alpha: float) -> tuple[list[float], list[float]]:
    """Advantages with λ = 1 − 1 / (α l), equation 5, and returns with λ = 1, section 4.1; γ = 1, reward at the end."""
    trace = max(0.0, 1 - 1 / (alpha * len(values)))
    advantages, returns, after = [0.0] * len(values), [0.0] * len(values), 0.0
    for t in reversed(range(len(values))):
        is_last = t == len(values) - 1
        error = (reward if is_last else values[t + 1]) - values[t]
        after = error + trace * after
        advantages[t], returns[t] = after, reward
    return advantages, returns


@pytest.mark.parametrize("alpha", [0.05, 0.3, 2.0])
def test_vapo_is_its_formula(alpha: float) -> None:
    rewards, values = torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=torch.float64), drawn(6)
    place = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))  # tokens come in any order
    positions = torch.cat([3 * torch.arange(size) for size in SIZES])  # with others between them
    given = RewardedSamples(rewards, torch.arange(4), Segments(ROWS[place], 4), positions[place])
    found = token_estimates(given, objective("vapo", gae_length_alpha=alpha), values=values[place])
    expected = [vapo(float(rewards[row]), values[row == ROWS].tolist(), alpha) for row in range(len(SIZES))]
    advantages, returns = (torch.tensor(list(itertools.chain(*column))) for column in zip(*expected, strict=True))
    assert found.returns is not None
    torch.testing.assert_close(found.advantages, advantages[place])
    torch.testing.assert_close(found.returns, returns[place])


def test_the_trace_follows_the_length_and_is_never_negative() -> None:
    found = length_adaptive_trace(torch.tensor([0, 1, 20, 40, 100, 20_000]), alpha=0.05)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.8, 0.999])


def test_the_critic_learns_returns_of_its_own_trace_from_the_same_values() -> None:
    """Decoupled: another λ of the policy changes advantages only, another of the critic returns only."""
    rewards, values, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.6]]), torch.ones(1, 3)
    given = RewardedSamples(
        torch.ones(1, dtype=torch.float64), torch.tensor([0]), Segments(torch.zeros(3).long(), 1), torch.arange(3)
    )
    options = objective("ppo", gae_lambda=0.5, critic_lambda=0.9, discount=0.8)
    found = token_estimates(given, options, values=values[0])
    of_policy, of_critic = (generalized_advantages(rewards, values, mask, discount=0.8, trace=t) for t in (0.5, 0.9))
    torch.testing.assert_close(found.advantages, of_policy.advantages[0])
    torch.testing.assert_close(found.returns, of_critic.returns[0])
