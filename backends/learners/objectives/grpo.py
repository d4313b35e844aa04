"""GRPO on one micro-batch: the clipped loss, importance correction, KL and entropy, weighted and summed.

Shao et al., arXiv 2402.03300. The loss is ``Σ weight · (pg · tis + kl_coef · kl − entropy_coef · entropy)``; every
figure that is reported is a sum with the same weights, so it adds up over the micro-batches of a step to the value
of the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.learners.objectives.correction import truncated_importance_weights
from penstock.backends.learners.objectives.kl import k3_kl
from penstock.backends.learners.objectives.policy_loss import clipped_policy_loss

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.options import ObjectiveOptions


class PolicyTokens(NamedTuple):
    """The trained tokens of a micro-batch; every tensor is float32 ``[N]``."""

    logprobs: Tensor
    """Of the policy that is trained, with gradient."""
    entropy: Tensor
    """With gradient where ``entropy_coef`` is not 0."""
    rollout_logprobs: Tensor
    """As the engine reported them."""
    reference_logprobs: Tensor | None
    """Of the frozen reference; None where ``kl_coef`` is 0."""
    advantages: Tensor
    weights: Tensor
    """Of the reduction, over the whole step."""


class ObjectiveTerms(NamedTuple):
    """What one micro-batch adds to the step."""

    loss: Tensor
    """Scalar, with gradient."""
    figures: dict[str, Tensor]
    """Detached scalars by metric name."""


def grpo_objective(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    """The loss of these tokens and its figures.

    A step is one optimiser step, so the policy that opens it is the one that is trained: its log-probs are
    ``tokens.logprobs`` without their gradient, and ``old_logprobs: recompute`` needs no further forward pass.
    """
    current = tokens.logprobs.detach()
    correct = options.old_logprobs == "recompute"
    old = current if correct else tokens.rollout_logprobs
    clipped = clipped_policy_loss(
        tokens.logprobs, old, tokens.advantages, clip_low=options.clip_low, clip_high=options.clip_high
    )
    per_token = clipped.loss
    values = {
        "train/pg_clipfrac": clipped.clipped,
        "train/ppo_kl": old - current,
        "train/ois": clipped.ratio,
        "train/entropy_loss": tokens.entropy,
        "train/train_rollout_logprob_abs_diff": (current - tokens.rollout_logprobs).abs(),
    }
    if correct and options.tis_clip is not None:
        tis = truncated_importance_weights(current, tokens.rollout_logprobs, upper=options.tis_clip)
        per_token = per_token * tis.weight
        values |= {"train/tis": tis.ratio, "train/tis_clipfrac": tis.truncated}
    values["train/pg_loss"] = per_token
    if tokens.reference_logprobs is not None:
        kl = k3_kl(tokens.logprobs, tokens.reference_logprobs)
        per_token = per_token + options.kl_coef * kl
        values["train/kl_loss"] = kl
    if options.entropy_coef:
        per_token = per_token - options.entropy_coef * tokens.entropy
    loss = (tokens.weights * per_token).sum()
    figures = {name: (tokens.weights * value.detach()).sum() for name, value in values.items()}
    return ObjectiveTerms(loss=loss, figures=figures | {"train/loss": loss.detach()})
