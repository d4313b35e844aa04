"""Runs beside each other: what differs, and their figures at equal steps, equal tokens and equal wall time.

Invariants:

* A figure at a point is measured there, or lies between two measurements of its run; beyond them there is none.
* A mean over the runs of an arm is of all of them or it is none; one run has no spread.
* What makes a figure no fair comparison is said in ``cautions``, not corrected.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.observability.compared_runs import (
    Difference,
    circumstance_differences,
    key_differences,
    read_arms,
)
from penstock.runtime.observability.courses import (
    Axis,
    Course,
    courses,
    first_reach,
    placed,
    places,
    reward_course,
    waste_of,
)
from penstock.runtime.observability.fairness import cautions_of
from penstock.runtime.observability.figures import END_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.compared_runs import ComparedArm, ComparedRun

METHOD: Final = (
    f"Reward and loss are means of {END_STEPS} steps; ages, rates and waste are of the run up to that point. Between "
    "two measured points a value is on the straight line between them; beyond them there is none. ± is the standard "
    "deviation over the runs of an arm. Wall time is that of training, without starts; tokens are all that were "
    "generated."
)
_TOTALS: Final[dict[Axis, str]] = {Axis.STEPS: "steps", Axis.TOKENS: "tokens", Axis.WALL_TIME: "training_s"}
"""The figure that is the same for all runs at a point of an axis."""


class ComparedRunOutline(msgspec.Struct, frozen=True, kw_only=True):
    """One run of an arm."""

    name: str
    folder: str
    seed: str
    num_steps: int
    """That it has trained."""
    outcome: str
    """Why it ended; empty while it goes on, and where it was cut off."""
    wall_s: float | None
    """From the start of the driver to the end, of the last drive."""
    training_s: float | None
    """Without starts."""


class ArmOutline(msgspec.Struct, frozen=True, kw_only=True):
    """One arm: runs whose scenarios differ in nothing but the seed."""

    name: str
    runs: tuple[ComparedRunOutline, ...]


class ArmFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the runs of one arm, in the unit of the figure."""

    mean: float
    std: float | None
    """Standard deviation over the runs; None of one run."""
    smallest: float
    largest: float
    num_runs: int


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of all arms."""

    name: str
    arms: tuple[ArmFigure | None, ...]
    """None where a run of the arm was not measured there."""


class EqualPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The figures where all runs have come equally far: the farthest point that all of them reached."""

    axis: Axis
    at: float
    """Steps, generated tokens, or seconds of training."""
    farthest_of: str
    """The run that came no further."""
    figures: tuple[ComparedFigure, ...]


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """What it took each arm until its reward was so high."""

    reward: float
    is_asked_for: bool
    """Else it is the highest that all runs reached."""
    num_steps: int
    """The reward is a mean of so many steps."""
    num_reached: tuple[int, ...]
    """Runs of each arm that reached it."""
    figures: tuple[ComparedFigure, ...]
    """Steps, tokens and seconds of training; None of an arm where not all runs reached it."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What ``penstock compare --json`` prints."""

    arms: tuple[ArmOutline, ...]
    keys: tuple[Difference, ...]
    """Of the scenarios."""
    circumstances: tuple[Difference, ...]
    """Model, machine, software and commit, where they differ."""
    cautions: tuple[str, ...]
    """Why some of this is no fair comparison, in sentences."""
    equal: tuple[EqualPoint, ...]
    reached: Reached | None
    """None where a run has no reward."""
    method: str = METHOD


def compare_runs(run_folders: Sequence[Path], *, reward: float | None = None) -> Comparison:
    """Compare the runs in these folders; ``reward``: that is to be reached, instead of the highest that all reached.

    Raises:
        UserFault: fewer than two runs, or one of them twice; a file of a run is missing or damaged, and is named.
    """
    return compare_arms(read_arms(run_folders), reward=reward)


def compare_arms(arms: Sequence[ComparedArm], *, reward: float | None = None) -> Comparison:
    """Compare what was read."""
    trained = [arm for arm in arms if any(run.steps for run in arm.runs)]
    keys, circumstances = key_differences(arms), circumstance_differences(arms)
    return Comparison(
        arms=tuple(ArmOutline(name=arm.name, runs=tuple(map(_outline, arm.runs))) for arm in arms),
        keys=keys,
        circumstances=circumstances,
        cautions=tuple(cautions_of(arms, keys, circumstances)),
        equal=tuple(point for axis in Axis if (point := _equal_point(arms, axis)) is not None) if trained else (),
        reached=_reached(arms, reward),
    )


def _outline(run: ComparedRun) -> ComparedRunOutline:
    summary, last = run.summary, run.steps[-1] if run.steps else None
    return ComparedRunOutline(
        name=run.name,
        folder=str(run.folder),
        seed=run.seed,
        num_steps=0 if last is None else last.version,
        outcome="" if summary is None else summary.story,
        wall_s=None if summary is None else summary.wall_s,
        training_s=None if last is None else last.training_s,
    )


def _equal_point(arms: Sequence[ComparedArm], axis: Axis) -> EqualPoint | None:
    """The farthest point that every run with steps reached; None where fewer than two know theirs."""
    runs = [run for arm in arms for run in arm.runs]
    where = {run.name: found for run in runs if (found := places(run.steps, axis))}
    if len(where) < 2:
        return None
    end, shortest = min((max(found.values()), name) for name, found in where.items())
    waste = sorted({cause for run in runs for cause in waste_of(run.steps)})
    measured = [[_measured(run, waste, where.get(run.name, {}), end) for run in arm.runs] for arm in arms]
    names = dict.fromkeys(name for values in measured for each in values for name in each if name != _TOTALS[axis])
    figures = (
        ComparedFigure(name=name, arms=tuple(_over_runs([each.get(name) for each in values]) for values in measured))
        for name in names
    )
    shown = tuple(each for each in figures if any(each.arms))
    return EqualPoint(axis=axis, at=end, farthest_of=shortest, figures=shown)


def _measured(run: ComparedRun, waste: Sequence[str], where: Mapping[int, float], at: float) -> dict[str, float | None]:
    named = courses(run.steps, run.evaluations, waste)
    return {name: placed(course, where).at(at) for name, course in named.items()}


def _over_runs(values: Sequence[float | None]) -> ArmFigure | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return ArmFigure(
        mean=statistics.fmean(known),
        std=statistics.stdev(known) if len(known) > 1 else None,
        smallest=min(known),
        largest=max(known),
        num_runs=len(known),
    )


def _reached(arms: Sequence[ComparedArm], asked: float | None) -> Reached | None:
    """When each run's reward, a mean of as many steps as every run has, up to ten, is first so high."""
    rewards = [[reward_course(run.steps) for run in arm.runs] for arm in arms]
    lengths = [len(course.values) for found in rewards for course in found]
    if not all(lengths):
        return None
    begin = min(END_STEPS, *lengths) - 1
    target = min(max(course.values[begin:]) for found in rewards for course in found) if asked is None else asked
    figures: list[ComparedFigure] = []
    for axis, name in _TOTALS.items():
        reached = [
            [
                _reach(course, places(run.steps, axis), target, begin)
                for run, course in zip(arm.runs, found, strict=True)
            ]
            for arm, found in zip(arms, rewards, strict=True)
        ]
        figures.append(ComparedFigure(name=name, arms=tuple(map(_over_runs, reached))))
    steps = [[max(course.values[begin:]) >= target for course in found] for found in rewards]
    return Reached(
        reward=target,
        is_asked_for=asked is not None,
        num_steps=begin + 1,
        num_reached=tuple(map(sum, steps)),
        figures=tuple(figures),
    )


def _reach(course: Course, where: Mapping[int, float], target: float, begin: int) -> float | None:
    return first_reach(placed(course, where), target, from_point=begin) if where else None
