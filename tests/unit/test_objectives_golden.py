"""Every objective against vectors that were computed elsewhere; tolerance 1e-5."""

from __future__ import annotations

import pytest
import torch

from penstock.backends.learners.objectives.advantages import group_normalized_advantages
from penstock.backends.learners.objectives.correction import truncated_importance_weights
from penstock.backends.learners.objectives.kl import k3_kl
from penstock.backends.learners.objectives.logprobs import token_entropy, token_logprobs
from penstock.backends.learners.objectives.policy_loss import clipped_policy_loss


def assert_near(actual: torch.Tensor, expected: list[float]) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=1e-6)


def test_k3_kl_has_the_golden_values() -> None:
    kl = k3_kl(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5]))
    assert_near(kl, [0.018731, 0.148721, 0.0])


def test_k3_kl_is_not_clamped() -> None:
    kl = k3_kl(torch.tensor([-6.0]), torch.tensor([-1.0]))
    torch.testing.assert_close(kl, torch.tensor([142.413162]), atol=1e-4, rtol=1e-6)


def test_clipped_policy_loss_has_the_golden_values() -> None:
    result = clipped_policy_loss(
        torch.tensor([-0.5, -1.5, -0.5, -1.5, 0.6]),
        torch.full((5,), -1.0),
        torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert_near(result.loss, [-1.28, -0.606531, 1.648721, 0.8, 4.953032])
    assert_near(result.clipped, [1.0, 0.0, 0.0, 1.0, 0.0])


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


def test_truncated_importance_weights_have_the_golden_values() -> None:
    weights = truncated_importance_weights(torch.full((4,), -1.0), torch.tensor([-2.0, -1.1, -0.9, -0.2]), upper=2.0)
    assert_near(weights.ratio, [2.718282, 1.105171, 0.904837, 0.449329])
    assert_near(weights.weight, [2.0, 1.105171, 0.904837, 0.449329])
    assert_near(weights.truncated, [1.0, 0.0, 0.0, 0.0])
