"""``penstock explain``: what binds a run, where its time went, what is doubtful, and what to turn next.

Everything is read from the run's folder, so it may go on, have ended, have crashed, or lie on another machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.names import LEARNER
from penstock.messages.texts import counted
from penstock.runtime.observability.explain.alarms import Alarm, alarms_of
from penstock.runtime.observability.explain.bindings import bindings_of
from penstock.runtime.observability.explain.bounds import Bound, bound_of
from penstock.runtime.observability.explain.causes import Binding
from penstock.runtime.observability.explain.critical_path import StepPath, step_paths
from penstock.runtime.observability.explain.facts import Facts
from penstock.runtime.observability.explain.measure import MIN_STEPS, measure, read_scenario
from penstock.runtime.observability.explain.stories import knob_of
from penstock.runtime.observability.lanes import lane_order
from penstock.runtime.observability.operations import read_operations, scalings_of
from penstock.runtime.observability.shares import LABELS, Shares
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.traces import TRACES_FOLDER
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.messages.training import Activity
    from penstock.runtime.observability.trackers import ActivityRow, StepRow

MAX_KNOBS: Final = 3
MAX_LANES: Final = 16


class LaneTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where one device's time went, over the whole run."""

    name: str
    percentages: dict[str, float]
    """By state; they add up to 100."""
    occupancy: float | None
    """Percent of the slots in use while it worked."""


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """What to turn next."""

    key: str
    change: str
    gain: float
    """Percent by which steps get shorter, at most: another bound may come first."""
    step_s: float
    """What a step would then take, at least."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's folder says of its speed. ``penstock explain --json`` prints it."""

    headline: str
    facts: Facts | None
    """None before there are enough steps."""
    bindings: tuple[Binding, ...]
    """The dearest cause first."""
    bound: Bound | None
    lanes: tuple[LaneTime, ...]
    scalings: tuple[str, ...]
    """Each change of the engines, with its reason, oldest first."""
    typical: StepPath | None
    slowest: tuple[StepPath, ...]
    alarms: tuple[Alarm, ...]
    """The heaviest first."""
    knobs: tuple[Knob, ...]
    """None while there are alarms: speed is no use to a run that learns from the wrong thing."""
    missing: tuple[str, ...]
    """What could not be said, and why."""

    @property
    def paths(self) -> tuple[StepPath, ...]:
        """The typical step's, then those of the slowest."""
        return self.slowest if self.typical is None else (self.typical, *self.slowest)


def explain(run_folder: Path, *, lanes: Mapping[str, Sequence[ActivityRow]] | None = None) -> Explanation:
    """Explain the run of a folder.

    Args:
        run_folder: of the run.
        lanes: where somebody has read them already.

    Raises:
        UserFault: the folder holds no run, or a file of it is damaged.
    """
    scenario = read_scenario(run_folder)
    steps, lanes = read_steps(run_folder), read_activity(run_folder) if lanes is None else lanes
    facts = measure(run_folder, scenario, steps, lanes)
    alarms = alarms_of(run_folder, scenario, steps)
    found = () if facts is None else bindings_of(facts)
    missing = _missing(facts, len(steps))
    typical, slowest = _paths(run_folder, facts, steps, scenario.observability.trace_fraction)
    return Explanation(
        headline=_headline(facts, found, len(steps)) + ("" if facts is not None else _end_text(run_folder)),
        facts=facts,
        bindings=found,
        bound=None if facts is None else bound_of(facts),
        lanes=_lanes(lanes),
        scalings=scalings_of(read_operations(run_folder)),
        typical=typical,
        slowest=slowest,
        alarms=alarms,
        knobs=() if facts is None or alarms else _knobs(facts, found),
        missing=missing,
    )


def _headline(facts: Facts | None, found: tuple[Binding, ...], num_steps: int) -> str:
    if facts is None or not found:
        return (
            f"what binds is not known: {counted(num_steps, 'step')}, and no stretch of "
            f"{MIN_STEPS} with engines and learner"
        )
    first = found[0]
    if not first.binds:
        return "nothing binds but the hardware"
    return f"{first.cause.value}: up to {first.cost_s:.3g} s of a step of {facts.step_s:.3g} s"


def _end_text(run_folder: Path) -> str:
    """Of a run that did not complete: what ended it, which is what binds it then."""
    summary = read_summary(run_folder)
    return "" if summary is None or summary.completed else f". The run did not complete: {summary.story}"


def _missing(facts: Facts | None, num_steps: int) -> tuple[str, ...]:
    if facts is not None:
        return facts.missing
    return (
        f"{MIN_STEPS} steps in which engines generated and the learner trained, of {num_steps} that there are: the "
        "first fifth, those after the last grant and those before the last switch of the policy do not count",
    )


def _paths(
    run_folder: Path, facts: Facts | None, steps: list[StepRow], trace_fraction: float
) -> tuple[StepPath | None, tuple[StepPath, ...]]:
    if facts is None or facts.samples is None or not (run_folder / TRACES_FOLDER).is_dir():
        return None, ()
    rows = [row for row in steps if facts.first_step - 1 <= row.version <= facts.last_step]
    return step_paths(run_folder, rows, trace_fraction)


def _lanes(lanes: Mapping[str, Sequence[ActivityRow]]) -> tuple[LaneTime, ...]:
    names = sorted(lanes, key=lane_order)[:MAX_LANES]
    return tuple(_lane(name, Shares(lanes[name])) for name in names)


def _lane(name: str, shares: Shares) -> LaneTime:
    told: dict[Activity, float] = {state: share for state, share in shares.percentages().items() if share}
    return LaneTime(
        name=name,
        percentages={LABELS[state]: share for state, share in told.items()},
        occupancy=None if name == LEARNER or shares.occupancy is None else 100 * shares.occupancy,
    )


def _knobs(facts: Facts, found: tuple[Binding, ...]) -> tuple[Knob, ...]:
    knobs: list[Knob] = []
    for binding in found:
        key, change = knob_of(facts, binding.cause, binding.cost_s)
        if key and key not in (knob.key for knob in knobs):
            step_s = facts.step_s - binding.cost_s
            knobs.append(Knob(key=key, change=change, gain=100 * binding.share, step_s=step_s))
    return tuple(knobs[:MAX_KNOBS])
