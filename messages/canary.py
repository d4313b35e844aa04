"""The canary: do the weights that an engine loaded behave like those that the learner exported?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import floats_view

if TYPE_CHECKING:
    from penstock.messages.weights import Canary

DIVERGED_NATS: Final = 50.0
"""A token: far beyond a uniform guess over any vocabulary, which is 12 nats among 150,000 tokens."""


def canary_difference(canary: Canary, logprobs: bytes) -> float:
    """Mean absolute difference of log-probs, in nats; infinite when the lengths differ or a value is not finite."""
    expected, found = floats_view(canary.logprobs), floats_view(logprobs)
    if len(expected) != len(found) or not len(expected):
        return float("inf")
    difference = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
    return difference if difference == difference else float("inf")


def divergence(canary: Canary, difference: float) -> str:
    """What is to be said in place of a difference where the canary shows, by the learner's own numbers, that the policy
    has blown up: what it found likely when the run began is next to impossible. Empty where it does not."""
    logprobs = floats_view(canary.logprobs)
    mean = sum(logprobs) / len(logprobs) if len(logprobs) else 0.0
    if mean > -DIVERGED_NATS:
        return ""
    return (
        f"the policy has diverged: what it found likely at the start has a mean log-prob of {mean:.3g} by the learner "
        f"itself (an engine differs by {difference:.3g} nats there). Begin a new run with a lower "
        "learner.learning_rate, with learner.warmup_steps, or with a lower learner.max_grad_norm"
    )
