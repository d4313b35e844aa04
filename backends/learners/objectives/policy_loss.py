"""Policy losses per token: PPO's clipped surrogate and what replaces it; and how they become one number.

Throughout, ``ratio = exp(logprobs − old_logprobs)``: the policy that is trained over the proximal one.

The loss of a step is ``Σ weight · x`` over its trained tokens, with weights that are fixed before it is split. All
tokens of a sample have the same weight, so one number a sample says it, and the parts of an episode, which share a
sample, share it too. A token that a correction takes out keeps its place in these counts: there is one denominator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.hooks.protocols import Segments
    from penstock.backends.learners.objective_names import Reduction

MAX_LOG_RATIO: Final = 20.0
"""Beyond it a ratio says nothing more, and ``exp`` must not overflow."""
SMALLEST_PROBABILITY: Final = 1e-7
"""Binary divergences keep this far from 0 and 1, where their logarithms end."""


class ClippedLoss(NamedTuple):
    """Per token ``[N]``."""

    loss: Tensor
    clipped: Tensor
    """1.0 where the bound decided, so that the ratio of this token gave no gradient (or, for CISPO, a bounded one);
    under SAPO the share of the gradient that the gate took."""
    ratio: Tensor


def probability_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``exp(logprobs − base_logprobs)`` per token ``[N]``, its logarithm held within ±20."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """``max(−ratio · A, −clip(ratio, 1 − clip_low, 1 + clip_high) · A)`` for each token.

    PPO, Schulman et al., arXiv 1707.06347; the wider upper bound ("clip-higher") is DAPO's, arXiv 2503.14476; where
    ``A < 0``, the dual clip holds the loss at ``−c · A`` at most, Ye et al., arXiv 1912.09729.

    Args:
        logprobs: of the policy that is trained ``[N]``; the gradient flows through it.
        old_logprobs: of the policy that the ratio is taken to ``[N]``.
        advantages: ``[N]``.
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above 1 the ratio still counts.
        dual_clip: ``c``, above 1; None: no bound.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(free, bounded)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(-dual_clip * advantages, loss), loss)
    return ClippedLoss(loss=loss, clipped=(bounded > free).to(free.dtype), ratio=ratio.detach())


def sequence_logprobs(logprobs: Tensor, old_logprobs: Tensor, sequences: Segments) -> Tensor:
    """Log-probs ``[N]`` whose ratio to ``old_logprobs [N]`` is GSPO's, the same for each token of a sequence:

    ``log s = Σ (logprobs − old_logprobs) / number of tokens``, over the counted tokens of the sequence. Zheng et al.,
    arXiv 2507.18071. The gradient of each token is that of its own log-prob (GSPO-token, section 4.3 there,
    ``sg(s) · π / sg(π)``), so a token is credited with its own advantage. Where all tokens of a sequence have the same
    advantage and the same weight, the gradient is that of ``s``. Hand the result to :func:`clipped_policy_loss`; its
    bounds are then around 3e-4.
    """
    ratio = sequences.spread(sequences.means((logprobs - old_logprobs).detach()))
    return old_logprobs + ratio + (logprobs - logprobs.detach())


def geometric_mean_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Segments,
    *,
    clip_low: float,
    clip_high: float,
) -> ClippedLoss:
    """``−s · A`` for each token, with the geometric mean ``s`` of the bounded ratios of its sequence.

    ``log s = mean of c``, ``c = min(d, clip_high)`` where ``A > 0`` and ``max(d, −clip_low)`` where ``A < 0``, with
    ``d = logprobs − old_logprobs``: the bounds are those of a logarithm, and hold token by token before the mean.
    GMPO, Zhao et al., arXiv 2507.20673. The gradient of each token is that of its own ``c``, ``s · A`` or
    0, so a token is credited with its own advantage; where all tokens of a sequence have the same advantage and
    weight, value and gradient are the paper's. Arguments as for :func:`clipped_policy_loss`.
    """
    apart = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounded = torch.where(advantages > 0, apart.clamp(max=clip_high), apart)
    bounded = torch.where(advantages < 0, bounded.clamp(min=-clip_low), bounded)
    mean = sequences.spread(sequences.means(bounded.detach()))
    loss = -(mean + bounded - bounded.detach()).exp() * advantages
    return ClippedLoss(loss=loss, clipped=(bounded != apart).to(apart.dtype), ratio=apart.detach().exp())


def soft_gated_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float
) -> ClippedLoss:
    """``−(4 / τ) · sigmoid(τ · (ratio − 1)) · A`` for each token, with ``τ = tau_pos`` where ``A > 0``, else
    ``tau_neg``.

    SAPO, Gao et al., arXiv 2511.20347. The gradient is that of ``−ratio · A``, times ``4 p (1 − p)`` with the sigmoid
    ``p``: 1 where the policy has not moved, towards 0 on either side. Other arguments as for
    :func:`clipped_policy_loss`.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1.0))
    closed = 1.0 - 4.0 * gate.detach() * (1.0 - gate.detach())
    return ClippedLoss(loss=-4.0 / tau * gate * advantages, clipped=closed, ratio=ratio.detach())


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> ClippedLoss:
    """``−sg(clip(ratio, 1 − clip_low, 1 + clip_high)) · A · logprobs`` for each token; ``sg`` stops the gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585: the weight is bounded and no token loses its gradient. ``clip_low`` of 1
    means no lower bound. Arguments as for :func:`clipped_policy_loss`.
    """
    ratio = probability_ratio(logprobs.detach(), old_logprobs)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -bounded * advantages * logprobs
    return ClippedLoss(loss=loss, clipped=(bounded != ratio).to(ratio.dtype), ratio=ratio)


def binary_total_variation(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``|π − μ|`` per token ``[N]``: the total variation between "this token" and "another one"."""
    return (logprobs.exp() - base_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``μ ln(μ / π) + (1 − μ) ln((1 − μ) / (1 − π))`` per token ``[N]`` in nats: KL(μ ‖ π) between "this token" and
    "another one", with π of ``logprobs`` and μ of ``base_logprobs``."""
    new, base = (
        values.exp().clamp(SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY) for values in (logprobs, base_logprobs)
    )
    return base * (base / new).log() + (1.0 - base) * ((1.0 - base) / (1.0 - new)).log()


def divergence_masked_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Tensor,
    threshold_low: float,
    threshold_high: float,
    max_ratio: float | None = None,
) -> ClippedLoss:
    """``−M · ratio · A`` for each token, with ``M = 0`` where the policy has already moved too far the way that ``A``
    pulls: ``A > 0``, ``ratio > 1`` and a divergence above ``threshold_high``, or ``A < 0``, ``ratio < 1`` and one
    above ``threshold_low``.

    DPPO, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879, equations 11 to 14; with the
    total variation also the default loss of prime-rl. The paper bounds no ratio, and where the mask does not hold, a
    rare token that became likelier may weigh thousands of times; ``max_ratio`` bounds it as verl's ``dppo_tv`` and
    ``dppo_kl`` do, at 20 there: a token above keeps its gradient, with that weight.

    Args:
        logprobs: of the policy that is trained ``[N]``; the gradient flows through it.
        old_logprobs: of the policy that the ratio is taken to ``[N]``.
        advantages: ``[N]``.
        divergence: :func:`binary_total_variation` or :func:`binary_kl` of the two ``[N]``; no gradient flows here.
        threshold_low: for tokens that become less likely.
        threshold_high: for tokens that become more likely.
        max_ratio: largest weight of a token; None: none.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    is_bounded = torch.zeros_like(ratio, dtype=torch.bool)
    weight = ratio
    if max_ratio is not None:
        is_bounded = ratio.detach() > max_ratio
        weight = torch.where(is_bounded, max_ratio * probability_ratio(logprobs, logprobs.detach()), ratio)
    moved = divergence.detach()
    masked = ((advantages > 0) & (ratio > 1) & (moved > threshold_high)) | (
        (advantages < 0) & (ratio < 1) & (moved > threshold_low)
    )
    loss = torch.where(masked, 0.0, -weight * advantages)
    return ClippedLoss(loss=loss, clipped=(masked | is_bounded).to(ratio.dtype), ratio=ratio.detach())


def token_mean_weights(tokens_per_sample: Tensor) -> Tensor:
    """``Σ weight · x`` = the mean of ``x`` over all trained tokens of the step (DAPO, arXiv 2503.14476).

    Args:
        tokens_per_sample: trained tokens of each sample of the step ``[S]``, float32.

    Returns:
        The weight of each token of a sample ``[S]``.
    """
    return (1.0 / tokens_per_sample.sum().clamp(min=1)).expand_as(tokens_per_sample)


def sequence_mean_weights(tokens_per_sample: Tensor) -> Tensor:
    """``Σ weight · x`` = the mean over the samples of each one's mean over its trained tokens (GRPO,
    arXiv 2402.03300).

    A sample without trained tokens counts among the samples, with the value 0. Arguments and result as for
    :func:`token_mean_weights`.
    """
    return 1.0 / (tokens_per_sample.clamp(min=1) * tokens_per_sample.shape[0])


def constant_weights(tokens_per_sample: Tensor, *, num_tokens: int) -> Tensor:
    """``Σ weight · x`` = the mean over the samples of each one's sum over its trained tokens, over a constant.

    Dr. GRPO, Liu et al., arXiv 2503.20783: with the longest response that is possible as the constant, a long response
    is neither favoured nor punished. Other arguments and result as for :func:`token_mean_weights`.
    """
    return tokens_per_sample.new_full(tokens_per_sample.shape, 1.0 / (num_tokens * tokens_per_sample.shape[0]))


def reduction_weights(reduction: Reduction, tokens_per_sample: Tensor, *, constant_tokens: int | None = None) -> Tensor:
    """The weights ``[S]`` of the named reduction; ``constant`` needs ``constant_tokens``."""
    match reduction:
        case "token_mean":
            return token_mean_weights(tokens_per_sample)
        case "sequence_mean":
            return sequence_mean_weights(tokens_per_sample)
        case "constant":
            if constant_tokens is None:
                raise ValueError("reduction: constant needs constant_tokens, the longest response in tokens")
            return constant_weights(tokens_per_sample, num_tokens=constant_tokens)
        case _:
            assert_never(reduction)
