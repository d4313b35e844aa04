"""What simulations of a candidate came to, and which candidates no other is better than."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.prediction.forecast import Interval, interval
from penstock.runtime.prediction.planning.candidate import SECONDS_OF_HOUR, Candidate, Objective, Prices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.runtime.prediction.steady import Steady

AS_GOOD: Final = 0.01
"""Of the best: what is off by no more counts as equally good; of these the least stale is chosen."""
MILLION: Final = 1e6


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate, over its seeds."""

    candidate: Candidate
    num_seeds: int
    tokens_per_s: Interval
    """Of samples that were trained."""
    step_s: Interval
    goodput: Interval
    engines_busy: Interval
    learner_busy: Interval
    mean_age: Interval
    """Of trained samples, in versions."""
    cost: Interval | None
    """Of a million trained tokens; None without prices."""
    is_part: bool = False
    """By a part of the batch on a part of the engines (:mod:`.part`), and not played whole."""

    def value(self, objective: Objective) -> tuple[float, ...]:
        """The larger, the better."""
        match objective:
            case Objective.THROUGHPUT:
                return (self.tokens_per_s.mean,)
            case Objective.GOODPUT:
                return (round(self.goodput.mean / AS_GOOD), self.tokens_per_s.mean)
            case Objective.COST:
                assert self.cost is not None, "it takes prices"
                return (-self.cost.mean,)


def measured(
    candidate: Candidate, found: Sequence[Steady], prices: Prices | None, *, is_part: bool = False
) -> Measured:
    """The figures of one or more seeds."""
    hourly = None if prices is None else candidate.hourly(prices)

    def over(figure: Callable[[Steady], float]) -> Interval:
        return interval([figure(each) for each in found])

    return Measured(
        candidate=candidate,
        num_seeds=len(found),
        tokens_per_s=over(lambda each: each.tokens_per_s),
        step_s=over(lambda each: each.step_s),
        goodput=over(lambda each: each.goodput),
        engines_busy=over(lambda each: each.engines_busy),
        learner_busy=over(lambda each: each.learner_busy),
        mean_age=over(lambda each: sum(age * share for age, share in enumerate(each.ages))),
        cost=None if hourly is None else over(lambda each: hourly / SECONDS_OF_HOUR / each.tokens_per_s * MILLION),
        is_part=is_part,
    )


def chosen(found: Sequence[Measured], objective: Objective) -> Measured:
    """The best, or the least stale of those that are as good."""
    best = max(found, key=lambda each: each.value(objective))
    *exact, last = best.value(objective)
    near = [
        each
        for each in found
        if [*each.value(objective)[:-1]] == exact and each.value(objective)[-1] >= last - AS_GOOD * abs(last)
    ]
    return min(near, key=lambda each: (each.candidate.max_staleness, [-x for x in each.value(objective)]))


def pareto(found: Iterable[Measured]) -> list[Measured]:
    """Those that no other beats in speed, price (without prices: devices), bound of staleness and goodput at once, the
    quickest first."""
    all_found = sorted(found, key=lambda each: -each.tokens_per_s.mean)
    return [each for each in all_found if not any(_beats(other, each) for other in all_found if other is not each)]


def _axes(each: Measured) -> tuple[float, ...]:
    price = each.candidate.num_devices if each.cost is None else each.cost.mean
    return -each.tokens_per_s.mean, price, each.candidate.max_staleness, -round(each.goodput.mean, 2)


def _beats(one: Measured, other: Measured) -> bool:
    a, b = _axes(one), _axes(other)
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b
