"""What a run under chaos came to: taken from its folder, after its end.

Invariants:

* The verdict is clean only if every fault was brought about and every rule held.
* The ledger is asked twice: by ``penstock audit``'s own rules, and here by a count of what was trained and issued.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.evaluation import GroupEvaluated
from penstock.messages.ledger import GroupClosed, GroupRecorded, LedgerEntry, StepRecorded
from penstock.messages.names import is_engine
from penstock.messages.samples import TerminalState, group_name
from penstock.messages.texts import counted, does
from penstock.messages.training import Balance
from penstock.runtime.chaos.throughput import Throughput, window_of
from penstock.runtime.observability.figures import EMPTY_BALANCE
from penstock.runtime.observability.jsonl import read_rows
from penstock.runtime.observability.removed import EVENTS, removed_text
from penstock.runtime.observability.segments import files_in
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import EVENTS_FOLDER, EventRow, read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.runtime.chaos.injector import Injected
    from penstock.runtime.chaos.watch import WatchedRun

CHAOS_FILE: Final = "chaos.json"
SETTLE_GRACE_S: Final = 0.5
"""An engine may be handed a sample of a group that was admitted a moment ago: the word is still on its way."""
MIN_ADVANCES_A_STEP: Final = 8
"""Fewer reports of progress than this say little about the speed."""

_ENTRIES: Final[msgspec.msgpack.Decoder[LedgerEntry]] = msgspec.msgpack.Decoder(LedgerEntry)


class FaultVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one injected fault met, and whether the run got over it."""

    fault: str
    version: int
    """Steps that were recorded when it came."""
    at_s: float | None
    """On the run's clock; None when the run was over before it could come."""
    pid: int | None
    duration_s: float
    restored_after_s: float | None
    """Until the run was at 80 % of its usual speed again; None when it was over first."""
    back_after_s: float | None
    """Until the actor that was hit had a replacement that worked: an engine one that has made tokens. None when it was
    not replaced, or not an actor."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the run came to."""

    completed: bool
    exit_codes: tuple[int, ...]
    """Of each drive: that of ``penstock run``, then those of ``penstock resume``."""
    version: int
    num_steps: int
    problems: tuple[str, ...]
    """What must not be; empty for a clean run."""
    max_staleness: int
    staleness_bound: int
    issued: int
    trained: int
    evaluated: int = 0
    duplicate_groups: int
    """Trained under more than one version."""
    generated_again: int
    """Samples that were issued after their group had been admitted."""
    balance: Balance
    """At the end, or as the last step had it: samples and tokens by what became of them."""
    tokens_lost_estimate: int
    """Beside the balance: that killed engines had made and never handed over."""
    tokens_saved: int
    """That lost engines had reported, and that others went on from."""
    restarts: dict[str, int]
    usual_tokens_per_s: float | None
    faults: tuple[FaultVerdict, ...]
    hits: dict[str, int]
    """Frames and connections that faults of links have touched, by kind."""

    @property
    def is_clean(self) -> bool:
        return self.completed and not self.problems


class _History:
    """What the ledger says, entry by entry."""

    def __init__(self, path: Path) -> None:
        self.trained: Counter[tuple[int, int]] = Counter()
        """Groups, with which use of them."""
        self.versions: list[int] = []
        self.max_staleness = 0
        self.settled_unix_s: dict[str, float] = {}
        """By group, as people and the event log call it."""
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            rows = database.execute("SELECT written_at, body FROM entries ORDER BY sequence").fetchall()
        database.close()
        for written_at, body in rows:
            match _ENTRIES.decode(body):
                case StepRecorded() as step:
                    self.trained.update(zip(step.group_ids, step.uses or [1] * len(step.group_ids), strict=True))
                    self.versions.append(step.version)
                    self.max_staleness = max(self.max_staleness, step.max_staleness)
                case GroupRecorded() | GroupClosed() | GroupEvaluated() as entry:
                    self.settled_unix_s.setdefault(group_name(entry.group_id), written_at)
                case _:
                    pass


def judge(
    run: WatchedRun,
    injected: Sequence[Injected],
    *,
    num_steps: int,
    staleness_bound: int,
    progress_tokens: int,
    in_time: bool,
    orders: Path | None = None,
    hits: dict[str, int] | None = None,
) -> Verdict:
    """The verdict on a run that has ended, also written to ``chaos.json`` in its folder.

    Args:
        run: that was watched.
        injected: its faults.
        num_steps: that it was to make.
        staleness_bound: of its policy.
        progress_tokens: that an engine reports at a time.
        in_time: whether it ended before its time was over.
        orders: folder with what the reward function was told to do wrong.
        hits: what faults of links have touched.
    """
    folder = run.folder
    history = _History(folder / LEDGER_FILE)
    summary = read_summary(folder)
    steps, logs = read_steps(folder), EventLogs(folder)
    events = logs.of_engines()
    started_unix_s = min((step.seen_unix_s - step.at_s for step in run.steps), default=0.0)
    speed, usual = _speed(run, events, injected, started_unix_s, progress_tokens)
    again = _generated_again(events, history, started_unix_s)
    twice = sum(1 for count in history.trained.values() if count > 1)
    _note_losses(run, injected)
    completed = in_time and summary is not None and summary.completed and run.exit_codes[-1:] == [0]
    balance = summary.balance if summary is not None else steps[-1].balance if steps else None
    found = (*_problems(folder, history, injected, twice, again, staleness_bound, in_time=in_time), *_unheard(orders))
    verdict = Verdict(
        completed=completed,
        exit_codes=tuple(run.exit_codes),
        version=max(history.versions, default=0),
        num_steps=num_steps,
        problems=found,
        max_staleness=history.max_staleness,
        staleness_bound=staleness_bound,
        issued=0 if balance is None else balance.issued,
        trained=_ended(balance, TerminalState.TRAINED),
        evaluated=_ended(balance, TerminalState.EVALUATED),
        duplicate_groups=twice,
        generated_again=again,
        balance=balance or EMPTY_BALANCE,
        tokens_lost_estimate=0 if summary is None else summary.tokens_lost_estimate,
        tokens_saved=run.num_saved_tokens,
        restarts=dict(Counter(loss.name for loss in run.losses)),
        usual_tokens_per_s=usual,
        faults=tuple(_fault(one, injected, speed, usual, started_unix_s, logs) for one in injected),
        hits=hits or {},
    )
    (folder / CHAOS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n")
    return verdict


def _note_losses(run: WatchedRun, injected: Sequence[Injected]) -> None:
    """A stop that was short enough is nobody's loss."""
    for one in injected:
        one.was_lost = one.unix_s is not None and any(
            (loss.name, loss.epoch) == (one.fault.actor, one.epoch) for loss in run.losses
        )


def _problems(
    folder: Path,
    history: _History,
    injected: Sequence[Injected],
    twice: int,
    again: int,
    bound: int,
    *,
    in_time: bool,
) -> Iterator[str]:
    if not in_time:
        yield "the run was still going on when its time was over"
    try:
        yield from (f"audit: {finding.text}" for finding in audit_ledger(folder / LEDGER_FILE).findings)
    except LedgerStoreError as error:
        yield f"audit: {error}"
    if removed := removed_text(folder, EVENTS):
        yield f"what the engines did is not known in full: {removed}"
    if twice:
        yield f"{counted(twice, 'group')} {does(twice, 'were')} trained under more than one version"
    if again:
        yield f"{counted(again, 'sample')} {does(again, 'were')} issued again after the group was admitted"
    if history.versions != sorted(set(history.versions)):
        yield "the recorded versions do not rise by one"
    if history.max_staleness > bound:
        yield f"a token of age {history.max_staleness} was trained, the bound is {bound}"
    missed = [str(one.fault) for one in injected if one.unix_s is None]
    if missed:
        yield f"the run was over before these faults could come: {', '.join(missed)}"


def _unheard(orders: Path | None) -> Iterator[str]:
    left = [] if orders is None else sorted(order.name.partition("-")[0] for order in orders.iterdir())
    if left:
        yield f"no reward was asked for any more, so that these never happened: {', '.join(left)}"


_GENERATED: Final = ("GenerationAdvanced", "GenerationEnded")
"""What an engine says of tokens that it has made; the former only after ``engines.progress_tokens`` of a response."""


class EventLogs:
    """The event logs of a run's incarnations."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of_engines(self) -> list[EventRow]:
        return [row for path in self._files("engine") for row in read_rows(path, EventRow)]

    def works_from_s(self, name: str, after_s: float) -> float | None:
        """When the first incarnation of this name that was started after a moment did something, as far as it did."""
        found: list[float] = []
        for path in self._files(name.replace("/", "-")):
            rows = list(read_rows(path, EventRow))
            if not rows or rows[0].at_s < after_s:
                continue
            does = (row.at_s for row in rows if row.event in _GENERATED or not is_engine(name))
            found += [at_s for at_s in [next(does, None)] if at_s is not None]
        return min(found, default=None)

    def _files(self, prefix: str) -> list[Path]:
        return [each for each in files_in(self._folder / EVENTS_FOLDER) if each.name.startswith(f"{prefix}-")]


def _ended(balance: Balance | None, state: TerminalState) -> int:
    return 0 if balance is None else sum(count.num_samples for count in balance.ended if count.state == state)


def _generated_again(events: Sequence[EventRow], history: _History, started_unix_s: float) -> int:
    """Samples that an engine was handed although their group had been settled for some time."""
    count = 0
    for row in events:
        if row.event == "SampleIssued":
            settled_s = history.settled_unix_s.get(row.summary.partition("/")[0])
            count += settled_s is not None and started_unix_s + row.at_s > settled_s + SETTLE_GRACE_S
    return count


def _speed(
    run: WatchedRun,
    events: Sequence[EventRow],
    injected: Sequence[Injected],
    started_unix_s: float,
    progress_tokens: int,
) -> tuple[Throughput, float | None]:
    """The run's speed in tokens, and what was usual before the first fault."""
    advances = sorted(row.at_s for row in events if row.event == "GenerationAdvanced")
    points = [(at_s, float(progress_tokens)) for at_s in advances]
    if len(points) < MIN_ADVANCES_A_STEP * len(run.steps):
        points = [(step.at_s, float(step.num_tokens)) for step in run.steps]
    speed = Throughput(points, window_s=window_of(run.step_s()))
    first_s = min((one.unix_s for one in injected if one.unix_s is not None), default=None)
    until_s = first_s - started_unix_s if first_s is not None else points[-1][0] if points else 0.0
    since_s = run.steps[0].at_s if run.steps else 0.0
    return speed, speed.median_rate(since_s, until_s)


def _fault(
    one: Injected,
    injected: Sequence[Injected],
    speed: Throughput,
    usual: float | None,
    started_unix_s: float,
    logs: EventLogs,
) -> FaultVerdict:
    at_s = restored_s = back_s = None
    if one.unix_s is not None:
        at_s = one.unix_s - started_unix_s
        later = [other.unix_s for other in injected if other.unix_s is not None and other.unix_s > one.unix_s]
        next_s = min(later, default=math.inf) - started_unix_s
        restored_s = speed.restored_after_s(at_s, usual, next_s=next_s) if usual else None
        if one.was_lost:
            works_s = logs.works_from_s(one.fault.actor, at_s)
            back_s = None if works_s is None else works_s - at_s
    return FaultVerdict(
        fault=str(one.fault),
        version=one.version,
        at_s=at_s,
        pid=one.pid,
        duration_s=one.fault.duration_s,
        restored_after_s=restored_s,
        back_after_s=back_s,
    )
