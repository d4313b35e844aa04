"""An objective put together from its terms: ``Σ weight · (pg · correction + kl_coef · kl
+ behaviour_kl_coef · kl to the behaviour policy − entropy_coef · entropy)``.

Invariants:

* Every figure is a sum over tokens with fixed weights, so it adds up over the micro-batches of a step to the value of
  the whole step. Those under ``sums/`` become a ratio in :func:`finished`.
* Where one token's loss depends on another's log-prob (:func:`couples_tokens`), the function has to be called with
  all tokens of the step at once. The caller sees to that.
* Where a batch is one optimiser step, the policy that opened it is the one that is trained: its log-probs are
  ``tokens.logprobs`` without their gradient. With several steps ``tokens.opening_logprobs`` has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

import torch

from penstock.backends.learners.hooks.objective import importance_by
from penstock.backends.learners.hooks.protocols import ImportanceInput
from penstock.backends.learners.objectives.correction import (
    icepop_weights,
    interpolated_logprobs,
    masked_importance_weights,
    off_policy_sequence_mask,
    truncated_importance_weights,
)
from penstock.backends.learners.objectives.kl import kl_estimate, squared_log_ratio
from penstock.backends.learners.objectives.mismatch import comparison, comparison_sums, engine_mismatch, mis_metrics
from penstock.backends.learners.objectives.policy_loss import (
    binary_kl,
    binary_total_variation,
    cispo_loss,
    clipped_policy_loss,
    divergence_masked_loss,
    geometric_mean_loss,
    probability_ratio,
    sequence_logprobs,
    soft_gated_loss,
)
from penstock.backends.learners.objectives.protocol import ObjectiveTerms
from penstock.backends.learners.objectives.unequal_weights import ESS, HEAVY, HEAVY_WEIGHT, LOG_RATIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from penstock.backends.learners.objectives.policy_loss import ClippedLoss
    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions

WEIGHT_SUM: Final = "sums/weight"
SQUARE_SUM: Final = "sums/square"
TOKEN_SUM: Final = "sums/tokens"
DISTANCE_SUM: Final = "sums/log_ratio_abs"
HEAVY_SUM: Final = "sums/heavy_weight"
RATIOS: Final = {
    LOG_RATIO: (DISTANCE_SUM, TOKEN_SUM),
    HEAVY_WEIGHT: (HEAVY_SUM, WEIGHT_SUM),
    "train/sft_loss": ("sums/sft", "sums/sft_tokens"),
    "train/nll": ("sums/nll", "sums/nll_tokens"),
    "train/kto_desirable_reward": ("sums/kto_desirable_reward", "sums/kto_desirable"),
    "train/kto_undesirable_reward": ("sums/kto_undesirable_reward", "sums/kto_undesirable"),
}
"""Figures that are a quotient of two sums, where the second is not 0."""
SFT_SUM, SFT_TOKENS = RATIOS["train/sft_loss"]
NLL_SUM, NLL_TOKENS = RATIOS["train/nll"]


class Corrected(NamedTuple):
    """A weight of each token's loss ``[N]``, and the figures that belong to it, per token."""

    weight: Tensor
    values: dict[str, Tensor]


def old_logprobs(tokens: PolicyTokens, options: ObjectiveOptions) -> Tensor:
    """Of the proximal policy, which the trust region is around ``[N]``; without gradient."""
    opening = tokens.logprobs if tokens.opening_logprobs is None else tokens.opening_logprobs
    match options.old_logprobs:
        case "engine":
            return tokens.rollout_logprobs
        case "recompute":
            return opening.detach()
        case "interpolate":
            return interpolated_logprobs(opening, tokens.rollout_logprobs, tokens.staleness)
        case _:
            assert_never(options.old_logprobs)


def policy_objective(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    """The loss of these tokens and its figures."""
    current, old = tokens.logprobs.detach(), old_logprobs(tokens, options)
    policy = _policy_loss(tokens, old, options)
    per_token = policy.loss
    values = {
        "train/pg_clipfrac": policy.clipped,
        "train/ppo_kl": old - current,
        "train/ois": probability_ratio(current, old),
        "train/entropy_loss": tokens.entropy,
    }
    if options.opsm_delta is not None:
        drawn = tokens.rollout_logprobs
        kept = off_policy_sequence_mask(current, drawn, tokens.advantages, tokens.samples, delta=options.opsm_delta)
        per_token = per_token * kept
        values["train/opsm_clipfrac"] = 1.0 - kept
    corrected = _correction(tokens, old, options)
    if corrected is not None:
        per_token = per_token * corrected.weight
        values |= corrected.values
    pg_loss = per_token
    if tokens.reference_logprobs is not None and options.kl_in == "loss":
        behaviour = old if options.unbiased_kl else None
        kl = kl_estimate(options.kl_estimator, tokens.logprobs, tokens.reference_logprobs, behaviour_logprobs=behaviour)
        per_token = per_token + options.kl_coef * kl
        values["train/kl_loss"] = kl
    if options.behaviour_kl_coef:
        apart = squared_log_ratio(tokens.logprobs, tokens.rollout_logprobs)
        per_token = per_token + options.behaviour_kl_coef * apart
        values["train/behaviour_kl"] = apart
    if options.entropy_coef:
        per_token = per_token - options.entropy_coef * tokens.entropy
    loss = weighted(tokens.weights, per_token)
    figures = {
        **always_reported(tokens),
        **{name: weighted(tokens.figure_weights, value.detach()) for name, value in values.items()},
        "train/pg_loss": weighted(tokens.weights, pg_loss.detach()),
        "train/loss": loss.detach(),
    }
    return ObjectiveTerms(loss, figures, (tokens.weights * per_token).detach())


def always_reported(tokens: PolicyTokens) -> dict[str, Tensor]:
    """How far learner and engine are apart on the same tokens, and what these are worth, whatever the objective is.

    Where nobody knows what drew some of the tokens of the batch, only those that the trained weights themselves have
    made are compared.
    """
    current, drawn = tokens.logprobs.detach(), tokens.rollout_logprobs
    values = {"rollout/log_probs": current, "rollout/advantages": tokens.advantages}
    if tokens.reference_logprobs is not None:
        values["rollout/ref_log_probs"] = tokens.reference_logprobs
    sums: dict[str, Tensor] = {}
    if tokens.knows_rollout:
        values |= {**engine_mismatch(current, drawn), "rollout/rollout_log_probs": drawn}
        ratio = probability_ratio(current, drawn)
        sums = {
            WEIGHT_SUM: ratio.sum(dtype=torch.float64),
            SQUARE_SUM: ratio.square().sum(dtype=torch.float64),
            TOKEN_SUM: ratio.new_tensor(ratio.numel(), dtype=torch.float64),
            DISTANCE_SUM: (current - drawn).abs().sum(dtype=torch.float64),
            HEAVY_SUM: torch.where(ratio > HEAVY, ratio, 0.0).sum(dtype=torch.float64),
        }
    return {
        **{name: weighted(tokens.figure_weights, value) for name, value in values.items()},
        **sums,
        **comparison_sums(tokens),
    }


def finished(totals: Mapping[str, float]) -> dict[str, float]:
    """The figures of a step from the sums over its micro-batches."""
    figures = {name: value for name, value in totals.items() if not name.startswith("sums/")}
    squares = totals.get(TOKEN_SUM, 0.0) * totals.get(SQUARE_SUM, 0.0)
    if squares > 0:
        figures[ESS] = totals[WEIGHT_SUM] ** 2 / squares
    for name, (part, whole) in RATIOS.items():
        if totals.get(whole, 0.0):
            figures[name] = totals[part] / totals[whole]
    return figures | comparison(totals)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """The sum over tokens, in float64: many small numbers, in whatever order the packing gives."""
    return (weights * values).sum(dtype=torch.float64)


def _policy_loss(tokens: PolicyTokens, old: Tensor, options: ObjectiveOptions) -> ClippedLoss:
    new, advantages = tokens.logprobs, tokens.advantages
    low, high = options.clip_low, options.clip_high
    match options.policy_loss:
        case "ppo" | "gspo":
            if options.policy_loss == "gspo":
                new = sequence_logprobs(new, old, tokens.samples)
            return clipped_policy_loss(new, old, advantages, clip_low=low, clip_high=high, dual_clip=options.dual_clip)
        case "gmpo":
            return geometric_mean_loss(new, old, advantages, tokens.samples, clip_low=low, clip_high=high)
        case "sapo":
            return soft_gated_loss(new, old, advantages, tau_pos=options.tau_pos, tau_neg=options.tau_neg)
        case "cispo":
            return cispo_loss(new, old, advantages, clip_low=low, clip_high=high)
        case "dppo_tv" | "dppo_kl":
            measure = binary_total_variation if options.policy_loss == "dppo_tv" else binary_kl
            return divergence_masked_loss(
                new,
                old,
                advantages,
                divergence=measure(new.detach(), old),
                threshold_low=low,
                threshold_high=high,
                max_ratio=options.max_ratio,
            )
        case "likelihood" | "divergence" | "dpo" | "kto":
            raise ValueError(f"policy_loss: {options.policy_loss} takes no ratio; open_objective gives its function")
        case _:
            assert_never(options.policy_loss)


def _correction(tokens: PolicyTokens, old: Tensor, options: ObjectiveOptions) -> Corrected | None:
    """None where the ratio is taken to the engine's own log-probs, or nothing is to be corrected."""
    if options.old_logprobs == "engine":
        return None
    if options.importance_function is not None:
        return _by_user(options.importance_function, tokens, old, options)
    if options.correction == "none":
        return None
    if options.correction == "mis":
        return _mis(tokens, old, options)
    if options.correction == "icepop":
        bounded = icepop_weights(old, tokens.rollout_logprobs, lower=options.icepop_low, upper=options.icepop_high)
    elif options.tis_clip is None:
        return None
    else:
        bounded = truncated_importance_weights(
            old, tokens.rollout_logprobs, upper=options.tis_clip, lower=options.tis_clip_low
        )
    return Corrected(bounded.weight, _tis_values(bounded.ratio) | {"train/tis_clipfrac": bounded.truncated})


def _by_user(function: str, tokens: PolicyTokens, old: Tensor, options: ObjectiveOptions) -> Corrected:
    given = ImportanceInput(
        logprobs=tokens.logprobs.detach().clone(),
        old_logprobs=old.detach().clone(),
        rollout_logprobs=tokens.rollout_logprobs.clone(),
        advantages=tokens.advantages.clone(),
        staleness=tokens.staleness.clone(),
        samples=tokens.samples,
    )
    weights, figures = importance_by(function, given, options)
    return Corrected(weights, {**_tis_values(probability_ratio(old, tokens.rollout_logprobs)), **figures})


def _mis(tokens: PolicyTokens, old: Tensor, options: ObjectiveOptions) -> Corrected:
    mis = options.mis
    masked = masked_importance_weights(
        old,
        tokens.rollout_logprobs,
        tokens.samples,
        level=mis.level,
        mode=mis.mode,
        upper=mis.upper,
        lower=mis.lower,
        normalize=mis.normalize,
        reject_level=mis.reject_level,
        reject_upper=mis.reject_upper,
        reject_lower=1.0 / mis.reject_upper if mis.reject_lower is None else mis.reject_lower,
        veto=mis.veto,
    )
    if mis.mode == "truncate":
        bounds = {"train/mis_tis_truncate_fraction": masked.above}
    else:
        prefix = f"train/mis_tis_{mis.mode}_fraction"
        bounds = {f"{prefix}_high": masked.above, f"{prefix}_low": masked.below}
    values = {
        **_tis_values(masked.ratio),
        **bounds,
        **mis_metrics(old, tokens.rollout_logprobs, tokens.samples),
        "train/mis_tis_weight_before_bound": masked.ratio,
        "train/mis_tis_weight_after_bound": masked.bounded,
        "train/mis_is_ratio_mean_after_tis_rs": masked.weight,
        "train/mis_rs_mask_fraction_high": masked.rejected_above,
        "train/mis_rs_mask_fraction_low": masked.rejected_below,
        "train/mis_rs_catastrophic_token_fraction": masked.catastrophic,
        "train/mis_rs_catastrophic_seq_fraction": masked.vetoed,
    }
    return Corrected(masked.weight, values)


def _tis_values(ratio: Tensor) -> dict[str, Tensor]:
    return {"train/tis": ratio, "train/tis_abs": (ratio - 1.0).abs()}


def checked_terms(terms: object, tokens: PolicyTokens, *, name: str) -> ObjectiveTerms:
    """What a user's function returned, with the figures that are always reported.

    Raises:
        TypeError: it is not an :class:`ObjectiveTerms`.
        ValueError: the loss is no scalar with a gradient, or a figure is no scalar.
    """
    if not isinstance(terms, ObjectiveTerms):
        raise TypeError(
            f"{name} returned {type(terms).__name__}; expected ObjectiveTerms(loss=…, figures=…) of "
            "penstock.backends.learners.objectives.protocol"
        )
    if terms.loss.ndim or not terms.loss.requires_grad:
        raise ValueError(
            f"{name} returned a loss with shape {list(terms.loss.shape)} "
            f"{'with' if terms.loss.requires_grad else 'without'} a gradient; expected a scalar that depends on "
            "tokens.logprobs: (tokens.weights * per_token).sum()"
        )
    if not bool(terms.loss.isfinite()):
        raise ValueError(f"{name} returned a loss of {float(terms.loss.detach())}; expected a finite number")
    if wrong := [key for key, value in terms.figures.items() if torch.as_tensor(value).ndim]:
        raise ValueError(f"{name} returned a figure '{wrong[0]}' that is no scalar; reduce it")
    figures = {key: torch.as_tensor(value).detach().to(terms.loss) for key, value in terms.figures.items()}
    return ObjectiveTerms(
        loss=terms.loss, figures={**figures, **always_reported(tokens), "train/loss": terms.loss.detach()}
    )
