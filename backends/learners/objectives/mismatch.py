"""How far the learner's log-probs are from the engine's on the same tokens, as figures; nothing here has a gradient.

What draws at another temperature differs token by token in one direction. With ``p`` the learner's distribution at its
temperature τ and ``q`` the engine's at ``τ / (1 + s)``, to first order in ``s``::

    log p(y) − log q(y) = −s (log p(y) + H(p))        since ∂ log p(y) / ∂ (1/τ) = τ (log p(y) + H(p))

So the slope of the difference over ``log p(y) + H(p)`` tells ``s``, and the share of its square that this explains
whether it is the temperature at all: rounding and wrong weights have no part in that direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.objectives.policy_loss import MAX_LOG_RATIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from penstock.backends.learners.hooks.protocols import Segments
    from penstock.backends.learners.objectives.protocol import PolicyTokens

FRESH_DIFFERENCE: Final = "train/fresh_logprob_abs_diff"
FRESH_TOKENS: Final = "train/fresh_tokens"
TEMPERATURE_SLOPE: Final = "train/fresh_temperature_slope"
TEMPERATURE_SHARE: Final = "train/fresh_temperature_share"
MIXED_DIFFERENCE: Final = "train/mixed_logprob_abs_diff"
FRESH_SUM, FRESH_COUNT = "sums/fresh_difference", "sums/fresh_tokens"
MIXED_SUM, MIXED_COUNT = "sums/mixed_difference", "sums/mixed_tokens"
SQUARES, PRODUCTS, SURPRISES = "sums/fresh_squares", "sums/fresh_products", "sums/fresh_surprises"
COMPARISON_SUMS: Final = (FRESH_SUM, FRESH_COUNT, MIXED_SUM, MIXED_COUNT, SQUARES, PRODUCTS, SURPRISES)


def comparison_sums(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Sums over the tokens that the trained weights have made.

    Of these, the ones whose whole sample the trained weights have made (fresh) say whether engine and learner compute
    the same model; the others (mixed) may have been drawn over a cache that older weights had filled.
    """
    logprobs, drawn = tokens.logprobs.detach(), tokens.rollout_logprobs
    recent = (tokens.staleness == 0) & drawn.isfinite()
    fresh = recent if tokens.is_of_one_version is None else recent & tokens.is_of_one_version
    difference = (logprobs - drawn).double()
    surprise = (logprobs + tokens.entropy.detach()).double()

    def total(which: Tensor, values: Tensor) -> Tensor:
        return torch.where(which, values, 0.0).sum()

    return {
        FRESH_SUM: total(fresh, difference.abs()),
        FRESH_COUNT: fresh.sum(),
        MIXED_SUM: total(recent & ~fresh, difference.abs()),
        MIXED_COUNT: (recent & ~fresh).sum(),
        SQUARES: total(fresh, difference.square()),
        PRODUCTS: total(fresh, difference * surprise),
        SURPRISES: total(fresh, surprise.square()),
    }


def comparison(sums: Mapping[str, float]) -> dict[str, float]:
    """The figures that those sums over a batch give; of tokens that there are not, none."""
    figures: dict[str, float] = {}
    if count := sums.get(FRESH_COUNT, 0.0):
        figures |= {FRESH_DIFFERENCE: sums[FRESH_SUM] / count, FRESH_TOKENS: count}
        squares, products, surprises = sums[SQUARES], sums[PRODUCTS], sums[SURPRISES]
        if squares > 0 and surprises > 0:
            figures |= {
                TEMPERATURE_SLOPE: products / surprises,
                TEMPERATURE_SHARE: products / squares * products / surprises,
            }
    if count := sums.get(MIXED_COUNT, 0.0):
        figures[MIXED_DIFFERENCE] = sums[MIXED_SUM] / count
    return figures


def engine_mismatch(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Per token ``[N]``, in nats: the absolute difference, and the k1 estimate of KL(engine ‖ learner), which is
    unbiased as the tokens are the engine's."""
    difference = logprobs.detach() - rollout_logprobs
    return {
        "train/train_rollout_logprob_abs_diff": difference.abs(),
        "train/train_rollout_kl": -difference,
    }


def mis_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, sequences: Segments) -> dict[str, Tensor]:
    """The metrics of MIS per token ``[N]``; what belongs to a sequence has the same value at each of its tokens.

    With ``d = old − rollout``: ``kl = −d``, ``k3_kl = e^d − d − 1``, ``log_ppl = −mean log-prob``,
    ``log_ppl_diff = mean rollout − mean old``, ``ppl_ratio = e^{log_ppl_diff}``, ``chi2_token = mean(e^{2d}) − 1`` and
    ``chi2_seq = e^{2 Σ d} − 1``, with exponents held within ±20 before they are doubled.
    """
    old = old_logprobs.detach()
    difference = old - rollout_logprobs
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training, rollout = (-sequences.spread(sequences.means(values)) for values in (old, rollout_logprobs))
    apart = training - rollout
    chi2_token = sequences.spread(sequences.means((2 * bounded).exp())) - 1.0
    total = sequences.spread(sequences.sums(difference)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "train/mis_kl": -difference,
        "train/mis_k3_kl": torch.expm1(bounded) - bounded,
        "train/mis_training_log_ppl": training,
        "train/mis_training_ppl": training.exp(),
        "train/mis_rollout_log_ppl": rollout,
        "train/mis_rollout_ppl": rollout.exp(),
        "train/mis_log_ppl_diff": apart,
        "train/mis_log_ppl_abs_diff": apart.abs(),
        "train/mis_ppl_ratio": apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        "train/mis_chi2_token": chi2_token,
        "train/mis_chi2_seq": (2 * total).exp() - 1.0,
    }
