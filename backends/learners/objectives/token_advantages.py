"""From the rewards of samples to an advantage for each trained token, by the estimator that the options name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, assert_never

import torch

from penstock.backends.learners.objectives.advantages import (
    decoupled_advantages,
    generalized_token_advantages,
    goes_on_after,
    group_normalized_advantages,
    leave_one_out_advantages,
    length_adaptive_trace,
    mean_normalized_advantages,
    reinforce_plus_plus_baseline_advantages,
    whitened,
)
from penstock.backends.learners.objectives.imitation import best_of_group, exponential_weights
from penstock.backends.learners.objectives.scan import reverse_recurrence

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.hooks.protocols import Segments
    from penstock.backends.learners.options import ObjectiveOptions


class RewardedSamples(NamedTuple):
    """The samples of a step and where their trained tokens stand."""

    rewards: Tensor
    """``[S]``, float64, so that the sums over a batch lose nothing."""
    group_ids: Tensor
    """``[S]``"""
    samples: Segments
    """Sample of each trained token ``[N]``; all tokens of the step."""
    positions: Tensor
    """Of each trained token among the response tokens of its sample, int64 ``[N]``."""
    components: Tensor | None = None
    """What the rewards are made of, float64 ``[S, K]`` in the order of ``component_weights``, for ``gdpo``; None for
    the others."""


class TokenEstimates(NamedTuple):
    """Of all trained tokens, float32 ``[N]``, without gradient."""

    advantages: Tensor
    returns: Tensor | None
    """What the critic is to predict, never whitened; None where there is no critic."""


def token_advantages(given: RewardedSamples, options: ObjectiveOptions, *, kl: Tensor | None = None) -> Tensor:
    """The advantages of :func:`token_estimates` ``[N]``, for an estimator without critic."""
    return token_estimates(given, options, kl=kl).advantages


def token_estimates(
    given: RewardedSamples,
    options: ObjectiveOptions,
    *,
    kl: Tensor | None = None,
    values: Tensor | None = None,
    reverse_kl: Tensor | None = None,
    found: Tensor | None = None,
) -> TokenEstimates:
    """Advantages, and with a critic returns, of all trained tokens of the batch.

    Args:
        given: the samples.
        options: which estimator, and what it takes.
        kl: estimate of the KL to the reference per token ``[N]``, for ``kl_in: reward``; None where there is none.
        values: of the critic before the first step of the batch ``[N]``, for ``gae``; None for the others.
        reverse_kl: of the proximal policy to the teacher per token ``[N]``, for ``opd_kl_coef``; None for no teacher.
            It is taken off before whitening, and no part of what a critic predicts.
        found: float64 ``[N]``, what takes the place of the estimator; None: nothing does.
    """
    exact_kl, exact_values = (None if given is None else given.detach().double() for given in (kl, values))
    advantages = _estimated(given, options, exact_kl, exact_values) if found is None else found
    returns = None
    if exact_values is not None:
        trace = options.critic_lambda
        of_critic = advantages if trace is None else _generalized(given, options, exact_kl, exact_values, trace=trace)
        returns = (of_critic + exact_values).float()
    if reverse_kl is not None:
        advantages = advantages - options.opd_kl_coef * reverse_kl.detach().double()
    if options.whiten:
        advantages = whitened(advantages)
    return TokenEstimates(advantages.float(), returns)


def _estimated(given: RewardedSamples, options: ObjectiveOptions, kl: Tensor | None, values: Tensor | None) -> Tensor:
    """float64 ``[N]``."""
    rewards, samples, coef = given.rewards, given.samples, options.kl_coef
    match options.estimator:
        case "teacher":
            return samples.spread(torch.zeros_like(rewards))
        case "grpo":
            normalized = group_normalized_advantages(rewards, given.group_ids, normalize_std=options.normalize_std)
            return samples.spread(normalized)
        case "maxrl":
            return samples.spread(mean_normalized_advantages(rewards, given.group_ids))
        case "gdpo":
            return samples.spread(_decoupled(given, options))
        case "rloo":
            # The response is one action, so the KL of all its tokens is part of its one reward.
            total = rewards if kl is None else rewards - coef * samples.sums(kl)
            return samples.spread(leave_one_out_advantages(total, given.group_ids))
        case "reinforce_plus_plus":
            if kl is None and options.discount == 1.0:  # the reward at the end, seen alike from every trained token
                return samples.spread(rewards)
            return _discounted(given, kl, options)
        case "reinforce_plus_plus_baseline" | "raw":
            if options.estimator == "raw":  # no baseline
                centred = samples.spread(rewards)
            else:
                centred = samples.spread(group_normalized_advantages(rewards, given.group_ids, normalize_std=False))
            # No position depends on another, so each token can stand in a row of its own.
            one = None if kl is None else kl[:, None]
            mask = centred.new_ones(len(centred), 1)
            return reinforce_plus_plus_baseline_advantages(centred, mask, kl=one, kl_coef=coef)[:, 0]
        case "gae":
            if values is None:
                raise ValueError("estimator: gae needs the values of a critic")
            return _generalized(given, options, kl, values)
        case "uniform":
            return samples.spread(torch.ones_like(rewards))
        case "best_of_group":
            least = -math.inf if options.min_reward is None else options.min_reward
            return samples.spread(best_of_group(rewards, given.group_ids, threshold=least).to(rewards.dtype))
        case "threshold":
            assert options.min_reward is not None, "the rules of the objective ask for it"
            return samples.spread((rewards >= options.min_reward).to(rewards.dtype))
        case "exponential":
            centred = group_normalized_advantages(rewards, given.group_ids, normalize_std=False)
            scale, most = options.reward_scale, options.max_weight
            return samples.spread(exponential_weights(centred, scale=scale, max_weight=most))
        case _:
            assert_never(options.estimator)


def _decoupled(given: RewardedSamples, options: ObjectiveOptions) -> Tensor:
    """GDPO ``[S]``."""
    if given.components is None or options.component_weights is None:
        raise ValueError("estimator: gdpo needs the components of the rewards, and component_weights that name them")
    return decoupled_advantages(
        given.components,
        given.rewards.new_tensor(list(options.component_weights.values())),
        given.group_ids,
        torch.bincount(given.samples.index, minlength=given.samples.count) > 0,
        normalize_std=options.normalize_std,
    )


def _generalized(
    given: RewardedSamples, options: ObjectiveOptions, kl: Tensor | None, values: Tensor, *, trace: float | None = None
) -> Tensor:
    """GAE ``[N]`` with this λ; None: with that of the policy."""
    in_order, alpha = _InOrder(given), options.gae_length_alpha
    of_policy = options.gae_lambda if alpha is None else length_adaptive_trace(in_order.sizes, alpha=alpha)
    return in_order.back(
        generalized_token_advantages(
            in_order.rewards(given, kl, options),
            values[in_order.order],
            in_order.sizes,
            discount=options.discount,
            trace=of_policy if trace is None else trace,
        )
    )


def _discounted(given: RewardedSamples, kl: Tensor | None, options: ObjectiveOptions) -> Tensor:
    """Returns ``[N]``, where a position that is not trained takes no time, as for ``gae``."""
    in_order = _InOrder(given)
    factors = options.discount * in_order.goes_on.to(given.rewards.dtype)
    rewards = in_order.rewards(given, kl, options)
    return in_order.back(reverse_recurrence(rewards, factors, longest=int(in_order.sizes.max())))


class _InOrder:
    """The trained tokens sample by sample, each sample's in the order of their positions."""

    def __init__(self, given: RewardedSamples) -> None:
        index, positions = given.samples.index, given.positions
        self.order = (index * (int(positions.max()) + 1) + positions).argsort()
        """Where each of them stands among the tokens of the batch ``[N]``."""
        self.sizes = torch.bincount(index, minlength=given.samples.count)
        """``[S]``"""
        self.goes_on = goes_on_after(self.sizes)
        """Whether another token of the sample follows ``[N]``."""

    def rewards(self, given: RewardedSamples, kl: Tensor | None, options: ObjectiveOptions) -> Tensor:
        """``[N]``: the sample's reward at its last trained token, less the KL at each."""
        ends = given.samples.spread(given.rewards)[self.order] * ~self.goes_on
        return ends if kl is None else ends - options.kl_coef * kl[self.order]

    def back(self, values: Tensor) -> Tensor:
        """Values of these tokens, in the order of the batch ``[N]``."""
        return torch.empty_like(values).index_copy(0, self.order, values)
