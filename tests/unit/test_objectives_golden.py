"""Every objective against vectors that were computed elsewhere; tolerance 1e-5."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from padded_objectives import generalized_advantages, reinforce_plus_plus_advantages

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.advantages import (
    group_normalized_advantages,
    reinforce_plus_plus_baseline_advantages,
    whitened,
)
from penstock.backends.learners.objectives.correction import (
    icepop_weights,
    off_policy_sequence_mask,
    truncated_importance_weights,
)
from penstock.backends.learners.objectives.kl import k3_kl, kl_estimate
from penstock.backends.learners.objectives.logprobs import kept_logprobs, token_entropy, token_logprobs
from penstock.backends.learners.objectives.policy_loss import cispo_loss, clipped_policy_loss, sequence_logprobs
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_advantages
from penstock.backends.learners.objectives.values import clipped_value_loss
from penstock.backends.learners.training.metrics import pass_at_k

if TYPE_CHECKING:
    from penstock.backends.learners.objective_names import KlEstimator

OLD = torch.full((5,), -1.0)
NEW = torch.tensor([-0.5, -1.5, -0.5, -1.5, 0.6])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])


def assert_near(actual: torch.Tensor, expected: list[float]) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=1e-6)


def test_k3_kl_has_the_golden_values() -> None:
    kl = k3_kl(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5]))
    assert_near(kl, [0.018731, 0.148721, 0.0])


def test_k3_kl_is_not_clamped() -> None:
    kl = k3_kl(torch.tensor([-6.0]), torch.tensor([-1.0]))
    torch.testing.assert_close(kl, torch.tensor([142.413162]), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.2, -0.5, 0.0]), ("k2", [0.02, 0.125, 0.0]), ("k3", [0.018731, 0.148721, 0.0])],
)
def test_kl_estimators_have_the_golden_values(estimator: KlEstimator, expected: list[float]) -> None:
    assert_near(kl_estimate(estimator, torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])), expected)


def test_unbiased_kl_has_the_golden_values() -> None:
    kl = kl_estimate(
        "k3",
        torch.tensor([-1.0, -2.0, -0.5]),
        torch.tensor([-1.2, -1.5, -0.5]),
        behaviour_logprobs=torch.tensor([-1.1, -1.6, -0.9]),
    )
    assert_near(kl, [0.020701, 0.099691, 0.0])


def test_low_var_kl_is_clamped() -> None:
    assert_near(kl_estimate("low_var_kl", torch.tensor([-6.0]), torch.tensor([-1.0])), [10.0])


def test_clipped_policy_loss_has_the_golden_values() -> None:
    result = clipped_policy_loss(NEW, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.28)
    assert_near(result.loss, [-1.28, -0.606531, 1.648721, 0.8, 4.953032])
    assert_near(result.clipped, [1.0, 0.0, 0.0, 1.0, 0.0])


def test_dual_clip_has_the_golden_values() -> None:
    result = clipped_policy_loss(NEW, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert_near(result.loss, [-1.28, -0.606531, 1.648721, 0.8, 3.0])


@pytest.mark.parametrize(
    ("clip_high", "loss", "clipped"),
    [
        (4.0, [0.824361, 0.909796, -0.824361, -0.909796, 2.97182], [0.0] * 5),
        (0.28, [0.64, 0.909796, -0.64, -0.909796, 0.768], [1.0, 0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_cispo_has_the_golden_values(clip_high: float, loss: list[float], clipped: list[float]) -> None:
    result = cispo_loss(NEW, OLD, ADVANTAGES, clip_low=1.0, clip_high=clip_high)
    assert_near(result.loss, loss)
    assert_near(result.clipped, clipped)


def test_gspo_has_the_golden_log_ratios() -> None:
    new, old = torch.tensor([-1.0, -2.0, -3.0, -0.5, -0.5]), torch.tensor([-1.2, -1.7, -3.5, -0.4, -0.9])
    sequences = Segments(torch.tensor([0, 0, 0, 1, 1]), 2, mask=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
    assert_near(old - sequence_logprobs(new, old, sequences), [0.05, 0.05, 0.05, -0.15, -0.15])


def test_opsm_has_the_golden_mask() -> None:
    kept = off_policy_sequence_mask(
        torch.tensor([-1.0, -2.0, -1.0, -2.0]),
        torch.tensor([-0.5, -1.0, -1.5, -2.5]),
        torch.full((4,), -1.0),
        Segments(torch.tensor([0, 0, 1, 1]), 2),
        delta=1e-4,
    )
    assert_near(kept, [0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("discount", "trace", "advantages", "returns"),
    [
        (0.99, 0.95, [0.414671, 0.551484, 0.3801, 0.2], [0.914671, 0.951484, 0.9801, 1.0]),
        (1.0, 1.0, [0.5, 0.6, 0.4, 0.2], [1.0] * 4),
    ],
)
def test_gae_has_the_golden_values(
    discount: float, trace: float, advantages: list[float], returns: list[float]
) -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.6, 0.8]])
    result = generalized_advantages(rewards, values, torch.ones(1, 4), discount=discount, trace=trace)
    assert_near(result.advantages[0], advantages)
    assert_near(result.returns[0], returns)


@pytest.mark.parametrize(
    ("discount", "mask", "expected"),
    [
        (0.9, [1.0, 1.0, 1.0, 1.0], [0.64754, 0.7306, 0.834, 0.96]),
        # The third was made by a tool, which takes no time: 0.96, −0.02 + 0.9 · 0.96, −0.01 + 0.9 · 0.844.
        (0.9, [1.0, 1.0, 0.0, 1.0], [0.7496, 0.844, 0.0, 0.96]),
        (1.0, [1.0, 1.0, 1.0, 0.0], [0.94, 0.95, 0.97, 0.0]),
    ],
)
def test_reinforce_plus_plus_has_the_golden_values(discount: float, mask: list[float], expected: list[float]) -> None:
    kl = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    advantages = reinforce_plus_plus_advantages(
        torch.ones(1), torch.tensor([mask]), kl=kl, kl_coef=0.1, discount=discount
    )
    assert_near(advantages[0], expected)


def test_reinforce_plus_plus_baseline_has_the_golden_values() -> None:
    kl = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    advantages = reinforce_plus_plus_baseline_advantages(torch.tensor([0.5]), torch.ones(1, 4), kl=kl, kl_coef=0.1)
    assert_near(advantages[0], [0.49, 0.48, 0.47, 0.46])


def test_raw_rewards_are_the_advantages() -> None:
    """Slime's grpo with --disable-rewards-normalization, and its baseline with it: [1, 0, 0, 0 | 1, 1, 1, 0]."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    given = RewardedSamples(
        rewards=rewards.double(),
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        samples=Segments(torch.arange(8), 8),
        positions=torch.zeros(8, dtype=torch.int64),
    )
    assert torch.equal(token_advantages(given, objective("reinforce")), rewards.double())
    kl = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0, -1.0])
    found = token_advantages(given, objective("reinforce", kl_coef=0.1), kl=kl)
    assert_near(found, [0.99, -0.02, -0.03, -0.04, 1.0, 1.0, 1.0, 0.1])


def test_whitening_has_the_golden_values() -> None:
    values, mask = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert_near(whitened(values, mask), [-1.0, 0.0, 1.0, 8.000001])


def test_clipped_value_loss_has_the_golden_values() -> None:
    result = clipped_value_loss(
        torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.2]), torch.tensor([1.0, 0.0]), value_clip=0.2
    )
    assert_near(result.loss, [0.09, 0.01])
    assert_near(result.clipped, [1.0, 0.0])


def test_pass_at_k_has_the_golden_values() -> None:
    corrects = [[bool(int(digit)) for digit in row] for row in ("1000", "1110", "0000")]
    assert pass_at_k(corrects) == pytest.approx({1: 1 / 3, 2: 0.5, 4: 2 / 3})
    assert pass_at_k([[True]]) == {}
    assert list(pass_at_k([[True] * 7, [False] * 5])) == [1, 2, 4]


def test_icepop_has_the_golden_values() -> None:
    weights = icepop_weights(torch.full((4,), -1.0), torch.tensor([-2.0, -1.1, -0.9, -0.2]), lower=0.5, upper=2.0)
    assert_near(weights.weight, [0.0, 1.105171, 0.904837, 0.0])
    assert_near(weights.truncated, [1.0, 0.0, 0.0, 1.0])


def test_group_advantages_have_the_golden_values() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    centred = group_normalized_advantages(rewards, groups, normalize_std=False)
    assert_near(centred, [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75])
    scaled = group_normalized_advantages(rewards, groups, normalize_std=True)
    assert_near(scaled, [1.499997, *[-0.499999] * 3, *[0.499999] * 3, -1.499997])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0 / 3.0, -7.3])
def test_a_group_of_equal_rewards_has_no_advantage(reward: float) -> None:
    advantages = group_normalized_advantages(
        torch.full((8,), reward), torch.zeros(8, dtype=torch.int64), normalize_std=True
    )
    assert_near(advantages, [0.0] * 8)


def test_logprobs_and_entropy_have_the_golden_values() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    assert_near(token_logprobs(logits, torch.tensor([2, 1])), [-0.407606, -1.098612])
    assert_near(token_entropy(logits), [0.832396, 1.098612])


def test_logprobs_over_the_tokens_that_were_kept_have_the_golden_values() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    own, kept = logits[[0, 1], [2, 1]], torch.tensor([[1, 2], [0, 1]])
    found = kept_logprobs(own, logits.gather(1, kept), kept)
    assert_near(found.detach(), [-0.313262, -0.693147])
    torch.autograd.backward(found.sum())
    assert logits.grad is not None
    assert_near(logits.grad.flatten(), [0.0, -0.268941, 0.268941, -0.5, 0.5, 0.0])


def test_a_row_without_a_set_is_taken_over_the_whole_vocabulary_and_has_its_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    targets, kept = torch.tensor([2, 1]), torch.tensor([[-1, -1], [0, 1]])
    whole = token_logprobs(logits, targets, temperature=0.5)
    own = logits[[0, 1], targets]
    found = kept_logprobs(own, logits.gather(1, kept.clamp(min=0)), kept, whole=whole, temperature=0.5)
    assert_near(found.detach(), [float(whole[0].detach()), -0.693147])
    gradient = torch.autograd.grad(found.sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(gradient[0], torch.autograd.grad(whole[0], logits)[0][0])
    assert_near(gradient[1], [-1.0, 1.0, 0.0])


def test_truncated_importance_weights_have_the_golden_values() -> None:
    weights = truncated_importance_weights(torch.full((4,), -1.0), torch.tensor([-2.0, -1.1, -0.9, -0.2]), upper=2.0)
    assert_near(weights.ratio, [2.718282, 1.105171, 0.904837, 0.449329])
    assert_near(weights.weight, [2.0, 1.105171, 0.904837, 0.449329])
    assert_near(weights.truncated, [1.0, 0.0, 0.0, 0.0])
