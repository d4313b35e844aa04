"""The canary: do the weights that an engine loaded behave like those that the learner exported?

At each place of a short text the log-probs of a few tokens are compared. Their difference is told as a share of their
spread, so that it means the same whether a model says hardly anything yet or is sure of each token: in bfloat16 right
weights are off by about a hundredth, a model with two matrices swapped by half and more (`penstock bench canary`). In
nats both would be several times as large for the one model as for the other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import floats_view, tokens_view

if TYPE_CHECKING:
    from penstock.messages.weights import Canary

SMALLEST_SPREAD_NATS: Final = 0.01
"""A place at which a model says less has this spread: rounding is no share of nothing."""
DIVERGED_NATS: Final = 50.0
"""A token: far beyond a uniform guess over any vocabulary, which is 12 nats among 150,000 tokens."""


@lru_cache(maxsize=16)
def canary_difference(canary: Canary, logprobs: bytes) -> float:
    """How far these log-probs are from the canary's, as a share of how far the canary's lie apart.

    With ``a`` the canary's log-probs at a place and ``b`` those found, ``‖a − b‖ / ‖a − mean(a)‖``; of all places the
    mean, since in a mixture of experts rounding sends single tokens to another expert. On the virtual host a thousand
    engines find the very same, so the last ones are remembered.

    Returns:
        0 where both are the same; infinite when the lengths differ or a value is not finite.
    """
    expected, found = floats_view(canary.logprobs), floats_view(logprobs)
    width = len(tokens_view(canary.tokens))
    if not expected or len(expected) != len(found) or len(expected) != width * (width - 1):
        return math.inf
    floor = SMALLEST_SPREAD_NATS * math.sqrt(width)
    shares: list[float] = []
    for first in range(0, len(expected), width):
        at_place, there = expected[first : first + width].tolist(), found[first : first + width].tolist()
        mean = sum(at_place) / width
        spread = math.hypot(*(value - mean for value in at_place))
        shares.append(math.dist(at_place, there) / max(spread, floor))
    share = sum(shares) / len(shares)
    return share if math.isfinite(share) else math.inf


def divergence(canary: Canary) -> str:
    """What is to be said in place of a difference where the canary shows, by the learner's own numbers, that the policy
    has blown up: what it found likely when the run began is next to impossible. Empty where it does not."""
    width = len(tokens_view(canary.tokens))
    of_text = floats_view(canary.logprobs)[1 :: width + 1]  # of token t + 1 after tokens 0 … t
    mean = sum(of_text) / len(of_text) if len(of_text) else 0.0
    if mean > -DIVERGED_NATS:
        return ""
    return (
        f"the policy has diverged: what it found likely at the start has a mean log-prob of {mean:.3g} by the learner "
        "itself. Begin a new run with a lower learner.learning_rate, with learner.warmup_steps, or with a lower "
        "learner.max_grad_norm"
    )
