"""A comparison of runs as people read it, the same in the terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.texts import counted
from penstock.runtime.observability.courses import WASTE, Axis
from penstock.runtime.observability.texts import NOTHING, count_text, duration_text, number_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.runtime.observability.comparison import (
        ArmOutline,
        ComparedFigure,
        ComparedRunOutline,
        Comparison,
        EqualPoint,
        Reached,
    )

_DIGITS: Final = 4
_SPREAD_DIGITS: Final = 2
_LABELS: Final = {
    "steps": "steps trained",
    "tokens": "tokens generated",
    "training_s": "time of training",
    "step_time_s": "time of a step, s",
    "tokens_per_s": "tokens a second",
    "trained_tokens_per_s": "trained tokens a second",
    "goodput": "goodput (trained ÷ generated), %",
    "mean_age": "mean age, versions",
    "largest_age": "largest age, versions",
    "waste": "wasted of what was generated, %",
}
_PERCENT: Final = ("goodput", "waste")
_AXES: Final[dict[Axis, tuple[str, Callable[[float], str]]]] = {
    Axis.STEPS: ("At equal steps", lambda at: f"{count_text(round(at))} steps"),
    Axis.TOKENS: ("At equal tokens", lambda at: f"{count_text(round(at))} generated tokens"),
    Axis.WALL_TIME: ("At equal wall time", lambda at: f"{duration_text(at)} of training"),
}


class Table(NamedTuple):
    """Rows of texts below a title; the first column is what each row is about."""

    title: str
    detail: str
    head: list[str]
    rows: list[list[str]]


def arms_table(comparison: Comparison) -> Table:
    """Each run with its arm."""
    rows = [_run_cells(arm, run) for arm in comparison.arms for run in arm.runs]
    num_arms, num_runs = len(comparison.arms), len(rows)
    title = f"{counted(num_runs, 'run')} in {counted(num_arms, 'arm')}"
    detail = "Runs of one arm differ in their scenarios in nothing but the seed, their names and observability."
    return Table(title, detail, ["arm", "run", "seed", "steps", "training", "ended"], rows)


def differences_tables(comparison: Comparison) -> list[Table]:
    """What was not the same: keys of the scenarios, and circumstances."""
    head = ["", *(f"arm {arm.name}" for arm in comparison.arms)]
    titled = (("What the scenarios differ in", comparison.keys), ("What else differs", comparison.circumstances))
    return [
        Table(title, "", head, [[each.name, *(_values(found) for found in each.values)] for each in differences])
        for title, differences in titled
        if differences
    ]


def figures_tables(comparison: Comparison) -> list[Table]:
    """At the equal points, and what it took to reach the same reward."""
    found = [_equal_table(comparison.arms, point) for point in comparison.equal]
    return found if comparison.reached is None else [*found, _reached_table(comparison.arms, comparison.reached)]


def figure_label(name: str) -> str:
    """What a figure is called."""
    return f"  {name.removeprefix(WASTE)}, %" if name.startswith(WASTE) else _LABELS.get(name, name)


def _run_cells(arm: ArmOutline, run: ComparedRunOutline) -> list[str]:
    training = duration_text(run.training_s or None)
    return [arm.name, run.name, run.seed, count_text(run.num_steps), training, run.outcome or "no end written down"]


def _values(values: Sequence[str]) -> str:
    return "; ".join(value or NOTHING for value in values)


def _equal_table(arms: Sequence[ArmOutline], point: EqualPoint) -> Table:
    title, detail_of = _AXES[point.axis]
    rows = [_figure_cells(figure) for figure in point.figures]
    return Table(title, f"{detail_of(point.at)}, as far as {point.farthest_of} came", _head(arms), rows)


def _reached_table(arms: Sequence[ArmOutline], reached: Reached) -> Table:
    rows = [_figure_cells(figure) for figure in reached.figures]
    if any(num < len(arm.runs) for num, arm in zip(reached.num_reached, arms, strict=True)):
        nums = zip(reached.num_reached, arms, strict=True)
        rows.append(["runs that reached it", *(f"{num} of {len(arm.runs)}" for num, arm in nums)])
    which = "" if reached.is_asked_for else ", the highest that all runs reached"
    detail = f"mean reward of {reached.num_steps} steps at least {number_text(reached.reward)}{which}"
    return Table("Until the same reward", detail, _head(arms), rows)


def _head(arms: Sequence[ArmOutline]) -> list[str]:
    return ["", *(f"arm {arm.name}, n = {len(arm.runs)}" for arm in arms)]


def _figure_cells(figure: ComparedFigure) -> list[str]:
    return [figure_label(figure.name), *_cells(figure)]


def _cells(figure: ComparedFigure) -> Iterator[str]:
    for arm in figure.arms:
        if arm is None:
            yield NOTHING
        else:
            mean = _value_text(figure.name, arm.mean, _DIGITS)
            yield mean if arm.std is None else f"{mean} ± {_value_text(figure.name, arm.std, _SPREAD_DIGITS)}"


def _value_text(name: str, value: float, digits: int) -> str:
    if name == "training_s":
        return duration_text(value)
    if name in _PERCENT or name.startswith(WASTE):
        value *= 100
    return count_text(round(value)) if abs(value) >= 10**digits else number_text(value, digits)
