"""Advantages of samples in rows ``[S, T]``, as golden vectors and closed forms are written, by what trains: that takes
the trained tokens alone, end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.advantages import generalized_token_advantages
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates

if TYPE_CHECKING:
    from torch import Tensor


class Advantages(NamedTuple):
    advantages: Tensor
    returns: Tensor


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, trace: float
) -> Advantages:
    """GAE; positions that are not trained are stepped over, and have advantage and return 0."""
    trained = mask != 0
    advantages = torch.zeros_like(token_rewards)
    advantages[trained] = generalized_token_advantages(
        token_rewards[trained], values[trained], trained.sum(dim=1), discount=discount, trace=trace
    )
    return Advantages(advantages, (advantages + values) * trained)


def reinforce_plus_plus_advantages(
    rewards: Tensor, mask: Tensor, *, kl: Tensor, kl_coef: float, discount: float
) -> Tensor:
    """Before they are whitened."""
    sample, position = (mask != 0).nonzero(as_tuple=True)
    given = RewardedSamples(rewards.double(), torch.arange(len(rewards)), Segments(sample, len(rewards)), position)
    options = objective("reinforce_plus_plus", whiten=False, kl_coef=kl_coef, discount=discount)
    advantages = torch.zeros_like(kl)
    advantages[sample, position] = token_estimates(given, options, kl=kl[sample, position]).advantages
    return advantages


def discounted_returns(token_rewards: Tensor, *, discount: float) -> Tensor:
    """``Σ_l γ^l r_{t+l}``, by its definition."""
    ahead = torch.arange(token_rewards.shape[1])[:, None] - torch.arange(token_rewards.shape[1])
    return token_rewards @ torch.where(ahead >= 0, discount ** ahead.clamp(min=0).double(), 0.0)
