"""How the figures of a run went over its steps, its tokens and its time, for comparisons with other runs.

Invariants:

* A value between two measured points lies on the straight line between them. Before the first and after the last of
  them there is none.
* Places ascend along a run: of a total that was reported late the largest so far counts.
* An evaluation stands where its version was made, however much later its last answer came.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.runtime.observability.figures import END_STEPS, LOSS, REWARD, mean
from penstock.runtime.observability.plots import evaluation_courses
from penstock.runtime.observability.summary import generated_tokens, trained_tokens, wasted_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.trackers import StepRow

WASTE: Final = "waste/"
"""Before state and cause, of the courses of what was generated and not trained."""


class Axis(enum.StrEnum):
    """What runs are compared over."""

    STEPS = "steps"
    TOKENS = "tokens"
    """Generated ones."""
    WALL_TIME = "wall_time"
    """Seconds of training: without starts, and without the time between the drives of a run."""


class Points(NamedTuple):
    """Measured values of one figure; ``x`` ascends."""

    x: list[float]
    y: list[float]

    def at(self, x: float) -> float | None:
        """The value there; None outside of what was measured."""
        if not self.x or not self.x[0] <= x <= self.x[-1]:
            return None
        right = bisect_left(self.x, x)
        if self.x[right] == x:
            return self.y[right]
        return _between(self.y[right - 1], self.y[right], (x - self.x[right - 1]) / (self.x[right] - self.x[right - 1]))


class Course(NamedTuple):
    """One figure over the versions at which it was measured."""

    versions: list[int]
    values: list[float]


def places(steps: Sequence[StepRow], axis: Axis) -> dict[int, float]:
    """Where each version of a run lies on an axis; version 0 at 0. Empty where the run did not write it down."""
    rows: list[float]
    if axis is Axis.STEPS:
        rows = [float(row.version) for row in steps]
    elif axis is Axis.TOKENS:
        rows = list(itertools.accumulate((float(generated_tokens(row.balance)) for row in steps), max))
    else:
        rows = list(itertools.accumulate((row.training_s for row in steps), max))
    if not rows or rows[-1] <= 0:
        return {}
    return {0: 0.0} | {row.version: place for row, place in zip(steps, rows, strict=True)}


def placed(course: Course, where: Mapping[int, float]) -> Points:
    """A course over an axis; what was measured at a version of no known place is left out."""
    found = [(where[v], y) for v, y in zip(course.versions, course.values, strict=True) if v in where]
    return Points([x for x, _ in found], [y for _, y in found])


def reward_course(steps: Sequence[StepRow]) -> Course:
    """The reward as means of up to :data:`END_STEPS` steps."""
    return _trailing(_reported(steps, REWARD), END_STEPS)


def waste_of(steps: Sequence[StepRow]) -> set[str]:
    """State and cause of all that was generated and not trained, such as ``filtered: zero_spread``."""
    return set(_waste(steps[-1])) if steps else set()


def courses(steps: Sequence[StepRow], evaluations: Sequence[EvaluationRow], waste: Sequence[str]) -> dict[str, Course]:
    """All figures that are compared, by name, in the order in which they are shown.

    Args:
        steps: of the run.
        evaluations: of the run.
        waste: states and causes that have a figure each, also where this run wasted nothing so.
    """
    reward, loss = reward_course(steps), _trailing(_reported(steps, LOSS), END_STEPS)
    named: dict[str, Course] = {"reward": reward} if reward.versions else {"loss": loss} if loss.versions else {}
    for dataset, found in evaluation_courses(evaluations).items():
        named |= {f"{dataset}: {name}": Course([int(v) for v in x], y) for name, (x, y) in found.items()}
    named |= {
        "steps": _each(steps, lambda row: float(row.version)),
        "tokens": _each(steps, lambda row: float(generated_tokens(row.balance))),
        "training_s": _each(steps, lambda row: row.training_s or None),
        "step_time_s": _each(steps, lambda row: _ratio(row.training_s, row.version)),
        "tokens_per_s": _each(steps, lambda row: _ratio(generated_tokens(row.balance), row.training_s)),
        "trained_tokens_per_s": _each(steps, lambda row: _ratio(trained_tokens(row.balance), row.training_s)),
        "goodput": _each(steps, lambda row: _ratio(trained_tokens(row.balance), generated_tokens(row.balance))),
        "mean_age": Course([row.version for row in steps], list(_mean_ages(steps))),
        "largest_age": Course([row.version for row in steps], list(_largest_ages(steps))),
        "waste": _each(steps, lambda row: _ratio(sum(_waste(row).values()), generated_tokens(row.balance))),
    }
    named |= {WASTE + cause: _each(steps, partial(_share_of_waste, cause)) for cause in waste}
    return {name: course for name, course in named.items() if course.versions}


def first_reach(points: Points, target: float, *, from_point: int) -> float | None:
    """Where a course first has at least this value, not counting its first points; None where it never has."""
    for place in range(from_point, len(points.y)):
        if points.y[place] >= target:
            before = points.y[place - 1] if place > from_point else target
            if before >= target:
                return points.x[place]
            return _between(points.x[place - 1], points.x[place], (target - before) / (points.y[place] - before))
    return None


def _between(low: float, high: float, share: float) -> float:
    return low + share * (high - low)


def _share_of_waste(cause: str, row: StepRow) -> float | None:
    return _ratio(_waste(row).get(cause, 0), generated_tokens(row.balance))


def _reported(steps: Sequence[StepRow], name: str) -> Course:
    return _each(steps, lambda row: row.metrics.get(name))


def _each(steps: Sequence[StepRow], value_of: Callable[[StepRow], float | None]) -> Course:
    found = [(row.version, value_of(row)) for row in steps]
    known = [(version, value) for version, value in found if value is not None and math.isfinite(value)]
    return Course([version for version, _ in known], [value for _, value in known])


def _trailing(course: Course, num_steps: int) -> Course:
    values = course.values
    means = (mean(values[max(0, end - num_steps) : end]) for end in range(1, len(values) + 1))
    return Course(course.versions, [value for value in means if value is not None])


def _ratio(value: float, over: float) -> float | None:
    return value / over if over > 0 else None


def _mean_ages(steps: Sequence[StepRow]) -> Iterator[float]:
    """Over all samples that were trained up to each step."""
    ages = itertools.accumulate(sum(map(operator.mul, row.staleness_counts, itertools.count())) for row in steps)
    nums = itertools.accumulate(sum(row.staleness_counts) for row in steps)
    return (total / num if num else 0.0 for total, num in zip(ages, nums, strict=True))


def _largest_ages(steps: Sequence[StepRow]) -> Iterator[float]:
    oldest = (max((age for age, num in enumerate(row.staleness_counts) if num), default=0) for row in steps)
    return map(float, itertools.accumulate(oldest, max))


def _waste(row: StepRow) -> dict[str, int]:
    wasted = wasted_tokens(row.balance)
    return {f"{each.state}: {each.cause}" if each.cause else each.state: each.num_tokens for each in wasted}
