"""What calibration reads from the folder of a recorded run: when each piece of work began and ended, and its size.

Times are Unix seconds. A run without a ledger or traces cannot be read: there is nothing to put in their place.

Invariants:

* Only pieces of work from the step on count at which the steady part begins (the first one, of a run that has none):
  before it, caches are cold, processes take their memory, and engines fill up, and what is predicted has none of it.
* A generation is *whole* if it is the only one of its sample, or a turn that nothing interrupted, and it began after
  that step: then its tokens and its time belong together. The others still count as running.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.decode_passes import DISTURBED, READING, READING_DISTURBED, bands_in
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER
from penstock.messages.samples import is_evaluation
from penstock.messages.texts import counted
from penstock.messages.training import Activity
from penstock.runtime.observability.actors_file import read_actors
from penstock.runtime.observability.explain.measure import read_scenario
from penstock.runtime.observability.facts import Start, read_starts
from penstock.runtime.observability.spans import CHAT, COMPLETION, trace_id_of
from penstock.runtime.observability.traces import TRACES_FOLDER, each_span, run_salt
from penstock.runtime.observability.trackers import read_activity, read_steps
from penstock.runtime.prediction.steady import recorded_steady, stretch_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.engines.decode_passes import DecodeBand
    from penstock.runtime.observability.actors_file import ActorNow
    from penstock.runtime.observability.traces import SpanRow
    from penstock.runtime.observability.trackers import ActivityRow, StepRow
    from penstock.runtime.prediction.steady import Steady
    from penstock.runtime.scenario.structure import Scenario

_TURNS: Final = (CHAT, COMPLETION)
_LOOKED_AT: Final = (
    *_TURNS, "generate", "score", "step", "publish", "digest", "fetch_weights", "apply_weights", "checkpoint",
)  # fmt: skip
_SAMPLES: Final = (
    "SELECT group_id, sample_index, num_tokens, reward, state, version, num_read_tokens, num_cached_tokens, outcome "
    "FROM samples"
)


class SampleSeen(NamedTuple):
    """A sample of the ledger."""

    group_id: int
    number: int
    """In its group."""
    num_tokens: int
    reward: float | None
    state: str | None
    version: int | None
    """Whose training it was in."""
    num_read: int | None
    num_cached: int | None
    outcome: str | None


class Generation(NamedTuple):
    """A stretch in which a request ran."""

    engine: str
    start_s: float
    end_s: float
    num_tokens: int
    is_whole: bool
    outcome: str
    sample: SampleSeen | None


class Hop(NamedTuple):
    """A message's way from the actor that has said it to the one that handles it."""

    duration_s: float
    is_even: bool
    """Of a step with an even number."""


class Turn(NamedTuple):
    """Of an episode."""

    start_s: float
    end_s: float
    conversation: int
    num_context: int
    """Tokens that the model had read before it."""
    num_tokens: int
    is_whole: bool
    """Nothing interrupted it."""


class Episode(NamedTuple):
    """One attempt at a sample, as its engine has played it."""

    engine: str
    turns: list[Turn]
    """One or more, in their order."""
    end_s: float
    is_whole: bool
    """It was seen from its first turn to its own end, and began in the part that counts."""
    sample: SampleSeen | None

    @property
    def is_even(self) -> bool:
        """Of a step with an even number."""
        return self.sample is not None and (self.sample.version or 1) % 2 == 0


class Work(NamedTuple):
    """Something that the learner or an engine did for one version."""

    who: str
    version: int
    start_s: float
    end_s: float
    size: float
    """Tokens of a step, bytes of a publish, else 0."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class CoresUsed(NamedTuple):
    """What the processes of a run had come to at a step, by role."""

    at_s: float
    """Seconds since the run's start."""
    cpu_s: Mapping[str, float]
    wait_s: Mapping[str, float]
    """For a core."""


class Recording(NamedTuple):
    """One run."""

    folder: Path
    start: Start
    """The last one: when, and on which machine."""
    scenario: Scenario
    num_steps: int
    steady: Steady | None
    offset_s: float
    """Unix time of the run's start."""
    trace_fraction: float
    samples: list[SampleSeen]
    """For training."""
    generations: list[Generation]
    scores_s: list[float]
    """How long rewards took, with the wait for a worker."""
    num_scored: int
    """Samples that have a reward, those of evaluations too."""
    work: dict[str, list[Work]]
    """By the name of the span."""
    activity: Mapping[str, Sequence[ActivityRow]]
    hops: Sequence[Hop] = ()
    """Of samples, from their engine to the Scorer."""
    episodes: Sequence[Episode] = ()
    """Whose turns are among the generations, each as one."""
    cores_used: Sequence[CoresUsed] = ()
    """At each step from the first one on."""
    bands: Sequence[DecodeBand] = ()
    """Decode passes that engines have timed and that nothing disturbed, from their start to their end,
    evaluations too; of each, the last incarnation."""
    disturbed: Sequence[DecodeBand] = ()
    """Likewise those that waited for a core, and that came after one which did."""
    reading: Sequence[DecodeBand] = ()
    """Likewise undisturbed passes that read the prompts of requests which they admitted."""
    reading_disturbed: Sequence[DecodeBand] = ()
    snapshot_s: float | None = None
    """That the learner took last to copy its state for a checkpoint; None: it was not told."""
    learner_waits: float | None = None
    """Time of the steps' training ÷ the time in which the thread that trains had a core; None: it was not told, or
    trained on a device of its own."""


def read_recording(folder: Path) -> Recording:
    """Read what a run has left.

    Raises:
        UserFault: it is no run's folder, was not traced, or has made too few steps.
    """
    scenario, steps = read_scenario(folder), read_steps(folder)
    if not (folder / TRACES_FOLDER).is_dir():
        raise UserFault(f"{folder}: it has no traces, which calibration reads; run with observability.tracing: true")
    if not (folder / LEDGER_FILE).is_file():
        raise UserFault(f"{folder}: it has no {LEDGER_FILE}, which calibration reads; was it simulated?")
    if not (starts := read_starts(folder)):
        raise UserFault(f"{folder}: it has no starts.jsonl, so nobody can tell where and when it ran")
    samples, recorded = _ledger(folder / LEDGER_FILE)
    if min(len(recorded), len(steps)) < 2:
        raise UserFault(
            f"{folder}: it has made {counted(min(len(recorded), len(steps)), 'step')}; calibration needs two or more"
        )
    said, max_staleness = read_actors(folder), scenario.staleness.max_staleness
    told = [] if said is None else [each.metrics for each in said.actors]
    assert max_staleness is not None, "read_scenario() resolves it"
    stretch = stretch_of(len(steps), max_staleness)
    begun_s = sorted(recorded.values())[0 if stretch is None else min(stretch[0], len(recorded) - 1)]
    all_spans = [row for row in each_span(folder) if row.name in _LOOKED_AT]
    spans = [row for row in all_spans if row.start_ns / 1e9 >= begun_s]
    by_trace = _by_trace(folder, samples)
    activity = read_activity(folder)
    episodes = _episodes(all_spans, by_trace, begun_s)
    on_cpu = scenario.learner.device == "cpu" or not starts[-1].facts.machine.gpus
    return Recording(
        folder=folder,
        start=starts[-1],
        scenario=scenario,
        num_steps=len(steps),
        steady=recorded_steady(steps, activity, max_staleness=max_staleness),
        offset_s=statistics.median(recorded[row.version] - row.at_s for row in steps if row.version in recorded),
        trace_fraction=scenario.observability.trace_fraction,
        samples=[sample for sample in samples if not is_evaluation(sample.group_id)],
        generations=[
            *_generations(all_spans, by_trace, begun_s),
            *(each for episode in episodes for each in generations_of(episode, begun_s)),
        ],
        scores_s=[row.duration_s for row in spans if row.name == "score"],
        num_scored=sum(sample.reward is not None for sample in samples),
        work=_work(spans),
        activity=activity,
        hops=_hops(spans, by_trace),
        episodes=episodes,
        cores_used=[CoresUsed(row.at_s, row.cpu_s, row.core_wait_s) for row in steps if row.cpu_s],
        bands=[band for metrics in told for band in bands_in(metrics)],
        disturbed=[band for metrics in told for band in bands_in(metrics, DISTURBED)],
        reading=[band for metrics in told for band in bands_in(metrics, READING)],
        reading_disturbed=[band for metrics in told for band in bands_in(metrics, READING_DISTURBED)],
        snapshot_s=None if said is None else _snapshot_s(said.actors),
        learner_waits=_learner_waits(steps[0 if stretch is None else stretch[0] :]) if on_cpu else None,
    )


def _snapshot_s(actors: Sequence[ActorNow]) -> float | None:
    return next((each.metrics.get("learner/snapshot_time_s") for each in actors if each.name == LEARNER), None)


def _learner_waits(steps: Sequence[StepRow]) -> float | None:
    told = [(row.metrics.get("perf/train_time") or 0.0, row.metrics.get("perf/train_cpu_time") or 0.0) for row in steps]
    if min(map(min, told)) <= 0:
        return None
    return max(1.0, sum(wall_s for wall_s, _ in told) / sum(cpu_s for _, cpu_s in told))


def _ledger(path: Path) -> tuple[list[SampleSeen], dict[int, float]]:
    with asked_ledger(path) as database:
        samples = [SampleSeen(*row) for row in database.execute(_SAMPLES)]
        recorded: dict[int, float] = dict(database.execute("SELECT version, recorded_at FROM steps").fetchall())
    return samples, recorded


def _by_trace(folder: Path, samples: Sequence[SampleSeen]) -> dict[str, SampleSeen]:
    salt = run_salt(folder)
    return {trace_id_of(salt, sample.group_id, sample.number).hex(): sample for sample in samples}


def _generations(spans: Sequence[SpanRow], by_trace: Mapping[str, SampleSeen], begun_s: float) -> list[Generation]:
    rows = [row for row in spans if row.name == "generate" and not row.attributes.get("num_turns")]
    times = Counter(row.trace_id for row in rows)
    return [
        Generation(
            engine=row.actor,
            start_s=row.start_ns / 1e9,
            end_s=row.end_ns / 1e9,
            num_tokens=round(_number(row, "num_tokens")),
            is_whole=times[row.trace_id] == 1 and row.start_ns / 1e9 >= begun_s,
            outcome=str(row.attributes.get("outcome", "")),
            sample=by_trace.get(row.trace_id),
        )
        for row in rows
    ]


def _hops(spans: Sequence[SpanRow], by_trace: Mapping[str, SampleSeen]) -> list[Hop]:
    """Of samples that were generated and scored once."""
    ends: defaultdict[str, list[int]] = defaultdict(list)
    begins: defaultdict[str, list[int]] = defaultdict(list)
    for row in spans:
        if row.name == "generate":
            ends[row.trace_id].append(row.end_ns)
        elif row.name == "score":
            begins[row.trace_id].append(row.start_ns)
    return [
        Hop(max(0.0, (begins[trace][0] - end_ns) / 1e9), trace in by_trace and (by_trace[trace].version or 1) % 2 == 0)
        for trace, (end_ns, *others) in ends.items()
        if not others and len(begins[trace]) == 1
    ]


def _episodes(spans: Sequence[SpanRow], by_trace: Mapping[str, SampleSeen], begun_s: float) -> list[Episode]:
    rows: defaultdict[tuple[str, float], list[SpanRow]] = defaultdict(list)
    for row in spans:
        if row.name in _TURNS:
            rows[row.trace_id, _number(row, "attempt")].append(row)
    found: list[Episode] = []
    for whole in spans:
        if whole.name == "generate" and (turns := rows.get((whole.trace_id, _number(whole, "attempt")))):
            turns.sort(key=lambda row: row.start_ns)
            ended = whole.attributes.get("outcome") in ("completed", "truncated")
            numbers = [round(_number(row, "turn")) for row in turns]
            is_whole = ended and numbers == list(range(1, len(turns) + 1)) and whole.start_ns / 1e9 >= begun_s
            sample = by_trace.get(whole.trace_id)
            found.append(Episode(whole.actor, [_turn(row) for row in turns], whole.end_ns / 1e9, is_whole, sample))
    return found


def _turn(row: SpanRow) -> Turn:
    return Turn(
        start_s=row.start_ns / 1e9,
        end_s=row.end_ns / 1e9,
        conversation=round(_number(row, "conversation")),
        num_context=round(_number(row, "num_context_tokens")),
        num_tokens=round(_number(row, "num_tokens")),
        is_whole=row.attributes.get("ending") not in ("interrupted", "cut_off"),
    )


def generations_of(episode: Episode, begun_s: float) -> list[Generation]:
    """Each turn as the generation that it was; of what it read, the share is in the cache that it is of all."""
    sample, found = episode.sample, list[Generation]()
    for turn in episode.turns:
        of_turn = sample
        if sample is not None:
            cached = (sample.num_cached or 0) / sample.num_read if sample.num_read else 0.0
            of_turn = sample._replace(
                num_tokens=turn.num_tokens, num_read=turn.num_context, num_cached=round(cached * turn.num_context)
            )
        is_whole = turn.is_whole and turn.start_s >= begun_s
        found.append(
            Generation(episode.engine, turn.start_s, turn.end_s, turn.num_tokens, is_whole, "completed", of_turn)
        )
    return found


def _work(spans: Sequence[SpanRow]) -> dict[str, list[Work]]:
    found: defaultdict[str, list[Work]] = defaultdict(list)
    for row in spans:
        if row.name in ("generate", "score", *_TURNS):
            continue
        size = _number(row, "size_bytes")
        if row.name == "step":
            size = _number(row, "num_trained_tokens") + _number(row, "num_masked_tokens")
        version = round(_number(row, "version"))
        found[row.name].append(Work(row.actor, version, row.start_ns / 1e9, row.end_ns / 1e9, size))
    return found


def _number(row: SpanRow, key: str) -> float:
    """An attribute; 0 where the span has none of this name."""
    value = row.attributes.get(key, 0)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def starts_s(recordings: Sequence[Recording], role: str) -> list[float]:
    """How long each engine, or the learner, was starting at the beginning of its run."""
    found: list[float] = []
    for recording in recordings:
        for name, lane in recording.activity.items():
            if name.partition("/")[0] == role:
                rows = list(itertools.takewhile(lambda row: row.activity is Activity.STARTING, lane))
                found += [rows[-1].end_s] if rows else []
    return found
