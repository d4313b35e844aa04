"""What repetitions say: a median, the interval that holds the true one, and whether a difference is more than noise.

Intervals are those of order statistics: nothing is supposed of how repetitions are spread, but that they do not depend
on each other. Of fewer than five repetitions no interval is good enough, and nothing is concluded from them.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

COVERAGE: Final = 0.95
"""The narrowest interval is taken that has it; the whole range where none has."""
LEAST_COVERAGE: Final = 0.93
"""What five repetitions reach."""

Verdict = Literal[
    "met", "missed", "less", "more", "no difference that can be told from noise", "too noisy", "too few repetitions"
]
UNTOLD: Final[tuple[Verdict, ...]] = ("too noisy", "too few repetitions")


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The true median, as far as repetitions tell."""

    median: float
    low: float
    high: float
    coverage: float
    """The chance that an interval made like this one holds the true median."""
    num_repetitions: int

    @property
    def is_enough(self) -> bool:
        return self.coverage >= LEAST_COVERAGE


def estimate(values: Sequence[float]) -> Estimate:
    """Of repetitions, in any order."""
    ordered, count = sorted(values), len(values)
    chosen, coverage, outside = 0, 0.0, 0.0
    for place in range((count + 1) // 2):
        # The true median is below all but ``place`` values, or above: twice the tail of fair coins.
        outside += 2 * math.comb(count, place) / 2**count
        if place and 1 - outside < COVERAGE:
            break
        chosen, coverage = place, max(0.0, 1 - outside)
    return Estimate(
        median=statistics.median(ordered),
        low=ordered[chosen],
        high=ordered[-1 - chosen],
        coverage=coverage,
        num_repetitions=count,
    )


def judge(found: Estimate, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
    """Whether a claim about the median holds: not told where the interval has its bound inside."""
    if not found.is_enough:
        return "too few repetitions"
    low = -math.inf if at_least is None else at_least
    high = math.inf if at_most is None else at_most
    if low <= found.low and found.high <= high:
        return "met"
    return "missed" if found.high < low or found.low > high else "too noisy"


def differs(before: Estimate, after: Estimate) -> Verdict:
    """Two measurements that were not made in turn: they differ where their intervals have nothing in common."""
    if not (before.is_enough and after.is_enough):
        return "too few repetitions"
    if after.high < before.low:
        return "less"
    return "more" if after.low > before.high else "no difference that can be told from noise"


def shown_from(before: Estimate, after: Estimate) -> float:
    """The least difference, as a share, that measurements with as wide intervals would show."""
    widths = ((one.high - one.low) / abs(one.median) if one.median else math.inf for one in (before, after))
    return sum(widths)
