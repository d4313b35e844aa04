"""The clipped surrogate of PPO and GRPO.

Schulman et al., arXiv 1707.06347; the wider upper bound ("clip-higher") is DAPO's, arXiv 2503.14476.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Beyond it a ratio says nothing more, and ``exp`` must not overflow."""


class ClippedLoss(NamedTuple):
    """Per token ``[N]``."""

    loss: Tensor
    clipped: Tensor
    """1.0 where the clipped branch was the larger one, so that the token gave no gradient."""
    ratio: Tensor


def probability_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``exp(logprobs − base_logprobs)`` per token ``[N]``, its logarithm held within ±20."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> ClippedLoss:
    """``max(−ratio · A, −clip(ratio, 1 − clip_low, 1 + clip_high) · A)`` for each token.

    Args:
        logprobs: of the policy that is trained ``[N]``; the gradient flows through it.
        old_logprobs: of the policy that the ratio is taken to ``[N]``.
        advantages: ``[N]``.
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above 1 the ratio still counts.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return ClippedLoss(loss=torch.maximum(free, bounded), clipped=(bounded > free).to(free.dtype), ratio=ratio.detach())
