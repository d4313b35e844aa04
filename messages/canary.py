"""The canary: do the weights that an engine loaded behave like those that the learner exported?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.arrays import floats_view

if TYPE_CHECKING:
    from penstock.messages.weights import Canary


def canary_difference(canary: Canary, logprobs: bytes) -> float:
    """Mean absolute difference of log-probs, in nats; infinite when the lengths differ or a value is not finite."""
    expected, found = floats_view(canary.logprobs), floats_view(logprobs)
    if len(expected) != len(found) or not len(expected):
        return float("inf")
    difference = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
    return difference if difference == difference else float("inf")
