"""What a run writes about itself as JSON lines: its steps, its time accounting and its events.

``metrics.jsonl`` has one object per step, and one per evaluation (:mod:`.evaluations`), ``activity.jsonl`` one per
span of an engine or the learner, an event log one array per handled event. All of them can be read while the run goes
on.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.samples import SampleKey
from penstock.messages.training import Activity, ActivitySpan, Balance, StepReported
from penstock.runtime.observability.activity import LaneTiler
from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows
from penstock.runtime.observability.segments import SegmentFile, files_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from penstock.messages.training import ActorReported
    from penstock.runtime.observability.evaluations import EvaluationRow

METRICS_FILE: Final = "metrics.jsonl"
ACTIVITY_FILE: Final = "activity.jsonl"
EVENTS_FILE: Final = "events.jsonl"
"""The event log of a host that has one for all actors."""
EVENTS_FOLDER: Final = "events"
"""The event logs of a host whose actors are processes: one for each incarnation."""
EVENTS_PER_WRITE: Final = 1024
MAX_SEARCHED: Final = 16
"""Subjects that are searched for in a line before it is decoded."""
_EVALUATION_LINE: Final = b'{"evaluation":'
MAX_DELAY_S: Final = 1.0
"""An event is in its file when another one follows it so much later, if not before."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as it stands in ``metrics.jsonl``."""

    version: int
    """The version that the step made."""
    at_s: float
    """When it was reported, in seconds since the start of the run."""
    num_steps: int
    """Steps that the run is to make in all."""
    metrics: dict[str, float | None]
    """By name; null where the learner gave a number that JSON does not have (an infinity, not a number)."""
    staleness_counts: tuple[int, ...]
    """Trained samples by age; the index is the age in versions."""
    response_lengths: tuple[int, ...]
    """Response tokens of each sample."""
    group_ids: tuple[int, ...]
    balance: Balance
    tokens_generated: int = 0
    """Since the start of the run."""
    policy: str = ""
    """Staleness policy that new grants followed then."""
    training_s: float = 0.0
    """Time in which the run trained, up to here: without starts, and without the time between its drives."""
    cpu_s: dict[str, float] = {}
    """CPU seconds by role since the start of the run, of the actors' processes and of the one that supervises them."""
    core_wait_s: dict[str, float] = {}
    """Likewise, seconds in which their threads could have run and no core was free; the supervisor's are not told."""

    @classmethod
    def of(
        cls,
        at_s: float,
        report: StepReported,
        *,
        tokens_generated: int = 0,
        training_s: float = 0.0,
        counted: Mapping[str, float] = MappingProxyType({}),
        cpu_s: Mapping[str, float] = MappingProxyType({}),
        core_wait_s: Mapping[str, float] = MappingProxyType({}),
    ) -> StepRow:
        """The row of a reported step; ``counted``: running totals of actors, which stand beside its metrics."""
        return cls(
            version=report.version,
            at_s=at_s,
            num_steps=report.num_steps,
            metrics={**counted, **{metric.name: metric.value for metric in report.metrics}},
            staleness_counts=report.staleness_counts,
            response_lengths=report.response_lengths,
            group_ids=report.group_ids,
            balance=report.balance,
            policy=report.policy,
            tokens_generated=tokens_generated,
            training_s=training_s,
            cpu_s=dict(cpu_s),
            core_wait_s=dict(core_wait_s),
        )


class ActivityRow(msgspec.Struct, frozen=True, kw_only=True):
    """One span of one lane, as it stands in ``activity.jsonl``. The spans of a lane tile its time."""

    actor: str
    epoch: int
    activity: Activity
    start_s: float
    end_s: float
    occupancy: float = 1.0
    """Mean of running ÷ capacity while working."""
    outside: float = 0.0
    """Mean of those that wait for tools, environments and agents ÷ capacity, in every state."""


class EventRow(msgspec.Struct, frozen=True, array_like=True):
    """One handled event, as it stands in an event log."""

    at_s: float
    actor: str
    epoch: int
    event: str
    about: str | SampleKey
    """Its subject; empty: nothing in particular."""

    @property
    def summary(self) -> str:
        """The subject in words: ``12/3``, ``12``, ``step 4``."""
        return str(self.about)


class MetricsLog:
    """Writes ``metrics.jsonl``, each step and evaluation at once."""

    def __init__(self, run_folder: Path) -> None:
        self._lines = JsonLinesWriter(run_folder / METRICS_FILE, lines_per_write=1)

    def append(self, row: StepRow | EvaluationRow) -> None:
        """Add one step, or one evaluation."""
        self._lines.append(row)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class ActivityLog:
    """Writes ``activity.jsonl`` from what the actors that have a lane report."""

    def __init__(self, run_folder: Path, *, resumes: bool = False, segment_bytes: int = 0) -> None:
        """
        Args:
            run_folder: where the file is.
            resumes: go on with the lanes that are in the file.
            segment_bytes: from what size on the file is closed and the next one begun; 0: never.
        """
        self._lines = JsonLinesWriter(run_folder / ACTIVITY_FILE, lines_per_write=64, segment_bytes=segment_bytes)
        self._lanes: dict[str, tuple[LaneTiler, int]] = {}
        for actor, rows in read_activity(run_folder).items() if resumes else ():
            last = rows[-1]
            span = ActivitySpan(last.activity, last.start_s, last.end_s, last.occupancy, last.outside)
            self._lanes[actor] = LaneTiler(span), last.epoch

    def append(self, report: ActorReported) -> list[ActivitySpan]:
        """Add the spans of a report; returns what was added to the actor's lane, gaps included."""
        if not report.activities:
            return []
        lane, _ = self._lanes.get(report.name) or (LaneTiler(), 0)
        self._lanes[report.name] = (lane, report.epoch)
        return self._write(report.name, report.epoch, lane.add(report.activities))

    def lost(self, actor: str) -> None:
        """This actor was given up: its lane is down until it is heard of again."""
        if actor in self._lanes:
            self._lanes[actor][0].lost()

    def joins(self, actor: str, now_s: float) -> list[ActivitySpan]:
        """This actor comes into the run; returns what that adds to its lane."""
        lane, epoch = self._lanes.setdefault(actor, (LaneTiler(), 0))
        return self._write(actor, epoch, lane.joins(now_s))

    def leaves(self, actor: str, now_s: float) -> list[ActivitySpan]:
        """This actor goes out of it; likewise."""
        lane, epoch = self._lanes.setdefault(actor, (LaneTiler(), 0))
        return self._write(actor, epoch, lane.leaves(now_s))

    def flush(self) -> None:
        """Make what was added readable."""
        self._lines.flush()

    def close(self, end_s: float, expected: Iterable[str] = ()) -> dict[str, list[ActivitySpan]]:
        """Tile every lane to the end of the run and close the file; returns what that added, by actor. ``expected``:
        actors that have a lane, heard of or not."""
        for name in expected:
            self._lanes.setdefault(name, (LaneTiler(), 0))
        added = {name: self._write(name, epoch, lane.close(end_s)) for name, (lane, epoch) in self._lanes.items()}
        self.abandon()
        return added

    def abandon(self) -> None:
        """Close the file with the lanes as far as they were reported."""
        self._lines.close()

    def _write(self, name: str, epoch: int, spans: list[ActivitySpan]) -> list[ActivitySpan]:
        for span in spans:
            self._lines.append(ActivityRow(actor=name, epoch=epoch, **msgspec.structs.asdict(span)))
        return spans


class EventLog:
    """A log of handled events with a digest over its lines, in batches: an append costs a fraction of a microsecond.

    Two logs have the same digest exactly when they hold the same events in the same order. For one thread.
    """

    def __init__(
        self, path: Path | None = None, *, events_per_write: int = EVENTS_PER_WRITE, segment_bytes: int = 0
    ) -> None:
        """
        Args:
            path: the file, written anew; None keeps the digest only.
            events_per_write: how many events are collected before they are hashed and written.
            segment_bytes: from what size on the file is closed and the next one begun; 0: never.
        """
        self.num_events = 0
        self._file = None if path is None else SegmentFile(path, max_bytes=segment_bytes, anew=True)
        self._events_per_write = events_per_write
        self._due_s = MAX_DELAY_S
        self._rows: list[tuple[float, str, int, str, str | SampleKey]] = []
        self._hash = blake2b(digest_size=16)
        self._encoder = msgspec.json.Encoder()

    def append(self, at_s: float, actor: str, epoch: int, event_name: str, about: str | SampleKey = "") -> None:
        """Add one event: when (seconds since the start of the run), who handled what, and what it was about."""
        rows = self._rows
        rows.append((at_s, actor, epoch, event_name, about))
        if len(rows) >= self._events_per_write or at_s >= self._due_s:
            self._due_s = at_s + MAX_DELAY_S
            self.flush()

    def flush(self) -> None:
        """Hash what was collected and hand it to the operating system.

        Raises:
            OSError: it could not be written.
        """
        rows, self._rows = self._rows, []
        if not rows:
            return
        self.num_events += len(rows)
        data = self._encoder.encode_lines(rows)
        self._hash.update(data)
        if self._file is not None:
            self._file.write(data)

    def digest(self) -> str:
        """BLAKE2b over every line so far, 32 hexadecimal digits."""
        self.flush()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


def read_steps(run_folder: Path) -> list[StepRow]:
    """The steps of a run, one a version, ascending; none if it made none. Where a version was trained again after the
    learner was lost, the last report counts.

    Raises:
        UserFault: the file is damaged.
    """
    path = run_folder / METRICS_FILE
    if not path.exists():
        return []
    rows = {row.version: row for row in read_rows(path, StepRow, is_row=lambda line: not is_evaluation_line(line))}
    return [rows[version] for version in sorted(rows)]


def is_evaluation_line(line: bytes) -> bool:
    """Whether a line of ``metrics.jsonl`` is that of an evaluation, and not a step's."""
    return line.startswith(_EVALUATION_LINE)


def read_activity(run_folder: Path) -> dict[str, list[ActivityRow]]:
    """The lanes of a run by actor, each in order of time; none if nothing was reported.

    Raises:
        UserFault: the file is damaged.
    """
    lanes: dict[str, list[ActivityRow]] = {}
    with suppress(FileNotFoundError):
        for row in read_rows(run_folder / ACTIVITY_FILE, ActivityRow):
            lanes.setdefault(row.actor, []).append(row)
    return lanes


def event_file(run_folder: Path, actor: str, epoch: int) -> Path:
    """Where one incarnation of an actor logs its events."""
    return run_folder / EVENTS_FOLDER / f"{actor.replace('/', '-')}-{epoch}.jsonl"


def read_run_events(run_folder: Path) -> list[EventRow]:
    """The events of a run, of one log or of all actors' logs, by time; those of one actor keep their order.

    Raises:
        UserFault: a log is damaged.
    """
    rows = [row for path in _event_logs(run_folder) for row in read_events(path)]
    return sorted(rows, key=lambda row: row.at_s)


def read_events_about(run_folder: Path, subjects: Collection[str | SampleKey]) -> list[EventRow]:
    """Of the events of a run those about these samples, and groups, steps and versions, which are named as
    :mod:`~penstock.runtime.observability.subjects` has them, by time.

    Raises:
        UserFault: a log is damaged.
    """
    # A search in bytes passes over nearly every line without decoding it, as long as there are few to search for.
    needles = [msgspec.json.encode(subject) for subject in subjects] if len(subjects) <= MAX_SEARCHED else []
    found: list[EventRow] = []
    for path in _event_logs(run_folder):
        rows = read_rows(path, EventRow, is_row=lambda line: not needles or any(map(line.__contains__, needles)))
        found += (row for row in rows if row.about in subjects)
    return sorted(found, key=lambda row: row.at_s)


def _event_logs(run_folder: Path) -> list[Path]:
    """Of all actors, or the one of a host that has one for all."""
    return files_in(run_folder / EVENTS_FOLDER) + [each for each in files_in(run_folder) if each.name == EVENTS_FILE]


def read_events(path: Path) -> Iterator[EventRow]:
    """The events of a log in order.

    Raises:
        FileNotFoundError: there is no such log.
        UserFault: the file is damaged.
    """
    return read_rows(path, EventRow)
