"""Reads the facts of a run from its folder: lanes, steps, the ledger's times, spans.

Invariants:

* It looks at the newest steps, without the first fifth of the run (engines fill up) and without what came after the
  last grant (they run empty): at most :data:`MAX_STEPS` of them, of one drive where the run was resumed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.options import num_slots
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.samples import TerminalState
from penstock.messages.training import Activity, UpdateMode
from penstock.runtime.observability.explain.cores import core_time
from penstock.runtime.observability.explain.facts import EngineTime, Facts, LearnerTime, SampleTimes, Waits
from penstock.runtime.observability.explain.waits import Moments, waits_of
from penstock.runtime.observability.facts import SCENARIO_FILE
from penstock.runtime.observability.operations import policy_in_force, read_operations
from penstock.runtime.observability.removed import SPANS, removed_text
from penstock.runtime.observability.shares import Shares
from penstock.runtime.observability.traces import TRACES_FOLDER, spans_between
from penstock.runtime.observability.training_time import newest_drive
from penstock.runtime.run_folder import file_of_run
from penstock.runtime.scenario.resolve import resolve
from penstock.runtime.scenario.source import read_source
from penstock.runtime.scenario.structure import Scenario

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.traces import SpanRow
    from penstock.runtime.observability.trackers import ActivityRow, StepRow

MIN_STEPS: Final = 4
"""Fewer say nothing about a steady state."""
MAX_STEPS: Final = 200
MIN_SPANS: Final = 6
"""Of an engine, to say how quick it is."""
_LOOKED_AT: Final = ("issue", "queue", "generate", "score", "version", "apply_weights")


class Stretch(NamedTuple):
    """The steps that are looked at, in seconds since the start of the run."""

    rows: list[StepRow]
    """The first one only begins it."""
    offset_s: float | None
    """Unix time of the run's start; None without a ledger."""

    @property
    def start_s(self) -> float:
        return self.rows[0].at_s

    @property
    def end_s(self) -> float:
        return self.rows[-1].at_s

    def overlap(self, start_s: float, end_s: float) -> float:
        """Seconds of this that lie in the stretch."""
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))


class GroupTimes(NamedTuple):
    """A group of the ledger, in Unix seconds."""

    granted_at: float
    admitted_at: float | None
    ended_at: float | None


def read_scenario(run_folder: Path) -> Scenario:
    """The run's own scenario, with every key; nothing of it is looked for on this machine.

    Raises:
        UserFault: it is missing or damaged.
    """
    path = file_of_run(run_folder, SCENARIO_FILE)
    source = read_source(path)
    try:
        return resolve(msgspec.convert(source.data, Scenario))
    except (msgspec.ValidationError, UserFault) as error:
        raise UserFault(f"{path}: {error}") from None


def measure(
    run_folder: Path,
    scenario: Scenario,
    steps: Sequence[StepRow],
    lanes: Mapping[str, Sequence[ActivityRow]],
) -> Facts | None:
    """The facts of a run; None before it has made :data:`MIN_STEPS` steps under the policy that holds now.

    Raises:
        UserFault: a file of the run is damaged.
    """
    missing: list[str] = []
    groups, recorded = _ledger(run_folder, missing)
    switch = policy_in_force(read_operations(run_folder))
    if switch is not None:
        steps = [row for row in steps if row.version > switch.version]
    stretch = _stretch(newest_drive(steps, MIN_STEPS + 1), groups, recorded)
    if stretch is None:
        return None
    engines = {name: rows for name, rows in lanes.items() if is_engine(name)}
    if not engines or LEARNER not in lanes:
        return None
    slots = num_slots(scenario.engines)
    is_colocated = scenario.engines.placement == "colocate"
    samples, spans = _samples(run_folder, scenario, stretch, missing)
    speeds = _speeds(spans)
    staleness, first, last = scenario.staleness, stretch.rows[0], stretch.rows[-1]
    target = staleness.target_outstanding
    update_mode = staleness.update_mode if switch is None else UpdateMode(switch.update_mode)
    assert update_mode is not None, "read_scenario() resolves it"
    outstanding, generating = _outstanding(stretch, groups)
    learner = _learner_time(_within(stretch, lanes[LEARNER]))
    times = tuple(_engine_time(name, _within(stretch, rows), speeds.get(name)) for name, rows in engines.items())
    return Facts(
        first_step=first.version + 1,
        last_step=last.version,
        step_s=(last.at_s - first.at_s) / (len(stretch.rows) - 1),
        policy=staleness.policy if switch is None else switch.policy,
        max_staleness=(staleness if switch is None else switch).max_staleness or 0,
        update_mode=update_mode,
        groups_per_batch=scenario.learner.groups_per_batch,
        samples_per_group=scenario.sampling.samples_per_group,
        max_concurrent=staleness.max_concurrent,
        target_outstanding=None if isinstance(target, str) else target,
        num_slots=slots,
        is_colocated=is_colocated,
        learner=learner,
        engines=times,
        samples=samples,
        waits=_waits(stretch, lanes, groups, spans, samples, slots / scenario.sampling.samples_per_group),
        outstanding=outstanding,
        in_generation=generating,
        rejected=_share(first, last, TerminalState.FILTERED),
        evaluated=_share(first, last, TerminalState.EVALUATED),
        cores=core_time(stretch.rows, learner, times),
        missing=tuple(missing),
    )


def _ledger(run_folder: Path, missing: list[str]) -> tuple[list[GroupTimes], dict[int, float]]:
    """Times of all groups, and when each step was recorded."""
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        missing.append(f"{LEDGER_FILE} is not there, so how many groups are under way is not known")
        return [], {}
    with asked_ledger(path) as database:
        groups = database.execute("SELECT granted_at, admitted_at, ended_at FROM groups").fetchall()
        steps = database.execute("SELECT version, recorded_at FROM steps").fetchall()
    return [GroupTimes(*row) for row in groups], dict(steps)


def _stretch(steps: Sequence[StepRow], groups: Sequence[GroupTimes], recorded: Mapping[int, float]) -> Stretch | None:
    offsets = [recorded[row.version] - row.at_s for row in steps if row.version in recorded]
    offset_s = statistics.median(offsets) if offsets else None
    first = max(len(steps) // 5, len(steps) - 1 - MAX_STEPS)
    rows = list(steps[first:])
    is_over = bool(steps) and steps[-1].version >= steps[-1].num_steps
    if is_over and groups and offset_s is not None:
        last_grant_s = max(group.granted_at for group in groups) - offset_s
        fed = [row for row in rows if row.at_s <= last_grant_s]
        rows = fed if len(fed) >= MIN_STEPS else rows[:MIN_STEPS]
    return Stretch(rows, offset_s) if len(rows) >= MIN_STEPS and rows[-1].at_s > rows[0].at_s else None


def _within(stretch: Stretch, rows: Sequence[ActivityRow]) -> Shares:
    clipped = [
        msgspec.structs.replace(
            row, start_s=max(row.start_s, stretch.start_s), end_s=min(row.end_s, stretch.end_s)
        )
        for row in rows
        if stretch.overlap(row.start_s, row.end_s)
    ]  # fmt: skip
    return Shares(clipped)


def _learner_time(shares: Shares) -> LearnerTime:
    total, seconds = shares.total_s or 1.0, shares.seconds
    return LearnerTime(
        training=seconds[Activity.WORKING] / total,
        waiting=(seconds[Activity.WAITING_FOR_SAMPLES] + seconds[Activity.ASLEEP]) / total,
        publishing=seconds[Activity.PUBLISHING] / total,
        checkpointing=seconds[Activity.CHECKPOINTING] / total,
        down=(seconds[Activity.DOWN] + seconds[Activity.STARTING]) / total,
    )


def _engine_time(name: str, shares: Shares, tokens_per_s: float | None) -> EngineTime:
    """Shares of the time that it was in the run."""
    total, seconds = shares.present_s or 1.0, shares.seconds
    return EngineTime(
        name=name,
        occupied=shares.occupied_s / total,
        outside=shares.outside_s / total,
        working=seconds[Activity.WORKING] / total,
        for_demand=seconds[Activity.WAITING_FOR_DEMAND] / total,
        for_weights=(seconds[Activity.WAITING_FOR_WEIGHTS] + seconds[Activity.APPLYING_WEIGHTS]) / total,
        asleep=seconds[Activity.ASLEEP] / total,
        down=(seconds[Activity.DOWN] + seconds[Activity.STARTING]) / total,
        tokens_per_s=tokens_per_s,
    )


def _outstanding(stretch: Stretch, groups: Sequence[GroupTimes]) -> tuple[float | None, float | None]:
    if stretch.offset_s is None:
        return None, None
    offset_s, end_s = stretch.offset_s, stretch.end_s
    until_end = until_admitted = 0.0
    for group in groups:
        start_s = group.granted_at - offset_s
        ended_s = end_s if group.ended_at is None else group.ended_at - offset_s
        admitted_s = ended_s if group.admitted_at is None else group.admitted_at - offset_s
        until_end += stretch.overlap(start_s, ended_s)
        until_admitted += stretch.overlap(start_s, min(admitted_s, ended_s))
    length_s = stretch.end_s - stretch.start_s
    return until_end / length_s, until_admitted / length_s


def _share(first: StepRow, last: StepRow, state: TerminalState) -> float:
    """Of the tokens of samples that ended in the stretch."""
    tokens = Counter[str]()
    for row, sign in ((last, 1), (first, -1)):
        for count in row.balance.ended:
            tokens[count.state] += sign * count.num_tokens
    total = tokens.total()
    return tokens[state.value] / total if total > 0 else 0.0


def _waits(
    stretch: Stretch,
    lanes: Mapping[str, Sequence[ActivityRow]],
    groups: Sequence[GroupTimes],
    spans: Sequence[SpanRow],
    samples: SampleTimes | None,
    capacity: float,
) -> Waits | None:
    offset_s = stretch.offset_s
    if samples is None or offset_s is None:
        return None
    ends = ((group, group.admitted_at or group.ended_at) for group in groups)
    under_way = [(group.granted_at - offset_s, stretch.end_s if end is None else end - offset_s) for group, end in ends]
    moments = Moments(stretch.start_s, stretch.end_s)
    median_s = samples.generate_median
    return waits_of(moments, lanes, spans, under_way, offset_s=offset_s, median_s=median_s, capacity=capacity)


# --- spans -----------------------------------------------------------------------------------------------------------


def _samples(
    run_folder: Path, scenario: Scenario, stretch: Stretch, missing: list[str]
) -> tuple[SampleTimes | None, list[SpanRow]]:
    """Where the samples that were traced spent their time, and the spans that say so."""
    if not (run_folder / TRACES_FOLDER).is_dir() or stretch.offset_s is None:
        missing.append("no traces (observability.tracing: true), so where samples spend their time is not known")
        return None, []
    if removed := removed_text(run_folder, SPANS, since=stretch.start_s + stretch.offset_s):
        missing.append(f"spans of some of these steps: {removed}")
    start_ns, end_ns = (round(1e9 * (at_s + stretch.offset_s)) for at_s in (stretch.start_s, stretch.end_s))
    spans = [row for row in spans_between(run_folder, start_ns, end_ns) if row.name in _LOOKED_AT]
    seconds: dict[str, list[float]] = {name: [] for name in _LOOKED_AT}
    for row in spans:
        seconds[row.name].append(row.duration_s)
    lengths = sorted(seconds["generate"])
    if len(lengths) < MIN_SPANS:
        missing.append(
            f"{len(lengths)} samples are traced in these steps, too few to say where samples spend their time; raise "
            "observability.trace_fraction"
        )
        return None, []
    batch = scenario.learner.groups_per_batch * scenario.sampling.samples_per_group
    waited = (row.attributes.get("row_wait_s") for row in spans if row.name == "issue")
    rows = [float(wait_s) for wait_s in waited if isinstance(wait_s, float | int)]
    return SampleTimes(
        num_samples=len(lengths),
        rows=_mean(rows) if rows else None,
        placing=max(0.0, _mean(seconds["issue"]) - _mean(rows)),
        queue=_mean(seconds["queue"]),
        generate=_mean(lengths),
        generate_median=statistics.median(lengths),
        generate_longest=lengths[min(len(lengths) - 1, int(len(lengths) * batch / (batch + 1)))],
        score=_mean(seconds["score"]),
        swap=_mean(seconds["apply_weights"]),
        announce=_mean(seconds["version"]),
    ), spans


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _speeds(spans: Sequence[SpanRow]) -> dict[str, float]:
    """Tokens a second of one request, by engine."""
    made: dict[str, list[tuple[float, int]]] = {}
    for row in spans:
        if row.name == "generate" and isinstance(num := row.attributes.get("num_tokens"), int):
            made.setdefault(row.actor, []).append((row.duration_s, num))
    return {
        name: sum(num for _, num in found) / seconds
        for name, found in made.items()
        if len(found) >= MIN_SPANS and (seconds := sum(each for each, _ in found)) > 0
    }
