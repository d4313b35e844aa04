"""Corrections for the difference between three policies: behaviour, proximal and current.

The behaviour policy drew the tokens (``rollout_logprobs``, as the engine reported them); the proximal one is what the
trust region is around (``old_logprobs``); the current one is trained. Decoupled PPO, Hilton et al., arXiv 2110.00641:
the policy loss takes the ratio current / proximal, and its value is weighted by proximal / behaviour, which is what
this module computes. No gradient flows through anything here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, assert_never

import torch

from penstock.backends.learners.objectives.policy_loss import MAX_LOG_RATIO, probability_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.hooks.protocols import Segments
    from penstock.backends.learners.objective_names import Level, MisMode


class ImportanceWeights(NamedTuple):
    """Per token ``[N]``; constants of the loss."""

    weight: Tensor
    ratio: Tensor
    """Before any bound."""
    truncated: Tensor
    """1.0 where a bound was reached."""


class MaskedImportance(NamedTuple):
    """Per token ``[N]``; constants of the loss."""

    weight: Tensor
    """0 for a rejected token."""
    bounded: Tensor
    """The same before rejection."""
    ratio: Tensor
    """Before any bound, at the level of the weight."""
    above: Tensor
    """1.0 where the ratio was above the upper bound of the weight."""
    below: Tensor
    rejected_above: Tensor
    """1.0 where the second ratio was above its upper bound."""
    rejected_below: Tensor
    catastrophic: Tensor
    """1.0 for a token that vetoes its sequence."""
    vetoed: Tensor
    """1.0 for the tokens of such a sequence."""


def interpolated_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Log-probs ``[N]`` of a proximal policy that is not recomputed: ``α · rollout + (1 − α) · current`` with
    ``α = 0`` at staleness 0 and ``1 / staleness`` above.

    A-3PO, Li et al., arXiv 2512.06547: at one version behind, the proximal policy is the one that drew the token.

    Args:
        logprobs: of the current policy ``[N]``.
        rollout_logprobs: of the behaviour policy ``[N]``.
        staleness: versions between the two, per token ``[N]``.
    """
    current = logprobs.detach()
    share = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1).to(current.dtype), 0.0)
    return share * rollout_logprobs + (1.0 - share) * current


def truncated_importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, upper: float, lower: float = 0.0
) -> ImportanceWeights:
    """``clamp(exp(old − rollout), lower, upper)`` for each token.

    TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    fengyao.notion.site/off-policy-rl.

    Args:
        old_logprobs: of the proximal policy, as the learner computes them ``[N]``.
        rollout_logprobs: as the engine reported them ``[N]``.
        upper: the bound.
        lower: the other one.
    """
    ratio = probability_ratio(old_logprobs.detach(), rollout_logprobs)
    weight = ratio.clamp(lower, upper)
    return ImportanceWeights(weight=weight, ratio=ratio, truncated=(weight != ratio).to(ratio.dtype))


def icepop_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, lower: float, upper: float) -> ImportanceWeights:
    """``exp(old − rollout)`` for each token where it lies within the bounds, 0 where it does not.

    IcePop, Ring-1T, arXiv 2510.18855. Arguments as for :func:`truncated_importance_weights`.
    """
    ratio = probability_ratio(old_logprobs.detach(), rollout_logprobs)
    outside = (ratio < lower) | (ratio > upper)
    return ImportanceWeights(weight=torch.where(outside, 0.0, ratio), ratio=ratio, truncated=outside.to(ratio.dtype))


def level_ratio(difference: Tensor, sequences: Segments, level: Level) -> Tensor:
    """``exp`` of the log-ratio of each token ``[N]`` at a level, its logarithm held within ±20.

    ``token``: of the token itself; ``sequence``: the sum over its sequence; ``geometric``: the mean over it.
    """
    match level:
        case "token":
            at_level = difference
        case "sequence":
            at_level = sequences.spread(sequences.sums(difference))
        case "geometric":
            at_level = sequences.spread(sequences.means(difference))
        case _:
            assert_never(level)
    return at_level.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def masked_importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequences: Segments,
    *,
    level: Level,
    mode: MisMode,
    upper: float,
    lower: float | None = None,
    normalize: bool = False,
    reject_level: Level | None = None,
    reject_upper: float = math.inf,
    reject_lower: float = 0.0,
    veto: float | None = None,
) -> MaskedImportance:
    """MIS: importance weights at a level, bounded, with rejection of whole tokens or sequences.

    Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    richardli.xyz/rl-collapse. A rejected token keeps its place in the denominator of the loss.

    Args:
        old_logprobs: of the proximal policy ``[N]``.
        rollout_logprobs: as the engine reported them ``[N]``.
        sequences: of the tokens.
        level: of the weight, as in :func:`level_ratio`.
        mode: ``truncate`` bounds the weight above, ``clip`` on both sides, ``mask`` makes it 0 outside the bounds.
        upper: bound of the weight.
        lower: the other one; None: ``1 / upper``. ``truncate`` has none.
        normalize: divide the weights by their mean (before rejection): over the counted tokens, or at the level of a
            sequence over the sequences, so that a long one does not count more often than it is weighed.
        reject_level: level of a second ratio that only decides what is rejected; None: no rejection by ratio.
        reject_upper: tokens above are rejected.
        reject_lower: tokens below are rejected.
        veto: a token whose own ratio is below rejects its whole sequence; None: none does.
    """
    difference = old_logprobs.detach() - rollout_logprobs
    ratio = level_ratio(difference, sequences, level)
    bound = 1.0 / upper if lower is None else lower
    least = 0.0 if mode == "truncate" else bound
    above, below = ratio > upper, ratio < least
    weight = torch.where(above | below, 0.0, ratio) if mode == "mask" else ratio.clamp(least, upper)
    if normalize:
        weight = weight / _mean_weight(weight, sequences, level).clamp(min=1e-8)
    too_high = too_low = torch.zeros_like(above)
    if reject_level is not None:
        second = level_ratio(difference, sequences, reject_level)
        too_high, too_low = second > reject_upper, second < reject_lower
    catastrophic = torch.zeros_like(above) if veto is None else difference < math.log(veto)
    vetoed = sequences.spread(sequences.sums(catastrophic.to(ratio.dtype))) > 0
    return MaskedImportance(
        weight=torch.where(too_high | too_low | vetoed, 0.0, weight),
        bounded=weight,
        ratio=ratio,
        above=above.to(ratio.dtype),
        below=below.to(ratio.dtype),
        rejected_above=too_high.to(ratio.dtype),
        rejected_below=too_low.to(ratio.dtype),
        catastrophic=catastrophic.to(ratio.dtype),
        vetoed=vetoed.to(ratio.dtype),
    )


def _mean_weight(weight: Tensor, sequences: Segments, level: Level) -> Tensor:
    if level == "token":
        counted = torch.ones_like(weight) if sequences.mask is None else sequences.mask
        return (weight * counted).sum() / counted.sum().clamp(min=1)
    has_tokens = (sequences.sizes(weight) > 0).to(weight.dtype)
    return (sequences.means(weight) * has_tokens).sum() / has_tokens.sum().clamp(min=1)


def off_policy_sequence_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, sequences: Segments, *, delta: float
) -> Tensor:
    """0.0 for each token ``[N]`` with ``A < 0`` in a sequence whose mean ``rollout − current`` is above ``delta``, else
    1.

    OPSM, DeepSeek-V3.2, arXiv 2512.02556: a bad response that the policy has already left is not pushed further away.
    The distance is taken from what the engine reported, so that it has both the age of the sample and the difference
    between engine and learner, whatever the ratio of the loss is taken to.

    Args:
        logprobs: of the current policy ``[N]``.
        rollout_logprobs: as the engine reported them ``[N]``.
        advantages: ``[N]``.
        sequences: of the tokens.
        delta: nats per token.
    """
    moved = sequences.spread(sequences.means(rollout_logprobs - logprobs.detach()))
    return 1.0 - ((advantages < 0) & (moved > delta)).to(moved.dtype)
