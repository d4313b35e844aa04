"""Corrections for the difference between the policy as the learner computes it and as the engine sampled it.

Truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.learners.objectives.policy_loss import probability_ratio

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceWeights(NamedTuple):
    """Per token ``[N]``; constants of the loss, no gradient flows through them."""

    weight: Tensor
    ratio: Tensor
    """Before truncation."""
    truncated: Tensor
    """1.0 where the bound was reached."""


def truncated_importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, upper: float) -> ImportanceWeights:
    """``min(exp(old − rollout), upper)`` for each token.

    Args:
        old_logprobs: of the policy that opened the step, as the learner computes them ``[N]``.
        rollout_logprobs: as the engine reported them ``[N]``.
        upper: the bound.
    """
    ratio = probability_ratio(old_logprobs.detach(), rollout_logprobs)
    return ImportanceWeights(weight=ratio.clamp(max=upper), ratio=ratio, truncated=(ratio > upper).to(ratio.dtype))
