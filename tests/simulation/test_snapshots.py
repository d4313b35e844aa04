"""A Buffer that is built from a snapshot of its predecessor's books stands where the whole ledger would bring it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun

from penstock.actors.buffer import machine as buffer_machine
from penstock.actors.buffer.books import Books
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.snapshots import restore, resume, snapshot_of
from penstock.backends.ledger.kept_books import decoded, encoded, with_payloads
from penstock.backends.ledger.memory import MemoryStore
from penstock.messages.books import BooksSnapshot, KeptBooks
from penstock.messages.commands import Send
from penstock.messages.local import Started
from penstock.messages.names import BUFFER
from penstock.messages.training import NoticeGiven
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from trials.trial import Trial

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import GroupRecorded, LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

POLICIES = ("sync", "one_step_off", "fully_async")
BESIDE = ("settings", "policy", "steps", "schedule", "_row_of")
"""Given to the books when they are made, or no part of their state."""
IN_ORDER = ("_groups", "_ready", "leases")
NUM_TRIALS = 10
"""Of each policy."""


def facts(value: object, floor: int = 0) -> Any:  # noqa: ANN401
    """All that an object of the books holds, whatever its attributes are called; in a form that can be compared."""
    if isinstance(value, Books):
        floor = value.settled.floor
    if isinstance(value, msgspec.Struct):
        return {name: facts(getattr(value, name), floor) for name in value.__struct_fields__}
    if not hasattr(value, "__dict__") or not type(value).__module__.startswith("penstock.actors.buffer"):
        return value
    found: dict[str, Any] = {}
    for name, held in vars(value).items():
        if name == "_spans":  # those below the floor are forgotten at some time or other
            found[name] = value.kept(floor).spans  # type: ignore[attr-defined]
        elif isinstance(held, dict):
            of_any = cast("dict[Any, object]", held)
            items = [(key, facts(item, floor)) for key, item in of_any.items()]
            found[name] = items if name in IN_ORDER else dict(items)
        elif name not in BESIDE:
            found[name] = facts(held, floor)
    return found


def fresh(buffer: Buffer) -> Books:
    return Books(buffer.settings, buffer.policy)


def restored(buffer: Buffer, snapshot: BooksSnapshot) -> Books:
    books = fresh(buffer)
    restore(books, snapshot)
    return books


class Pair(msgspec.Struct):
    """A snapshot at some commit, and what the fold of all entries up to there comes to."""

    buffer: Buffer
    snapshot: BooksSnapshot
    facts: Any


class SnapshotWatch(IdleWatcher):
    """Takes a snapshot at every commit. Implements ``Watcher``."""

    def __init__(self, run: TrialRun) -> None:
        self.run = run
        self.pairs: list[Pair] = []
        self.twins: list[Books] = []
        """Books that were restored at some commits, and have gone on from there."""
        self.num_compared = 0
        self._fold: Books | None = None
        self._epoch = -1
        run.host.watch(self, events=False)

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        buffer = process.shell.machine
        assert isinstance(buffer, Buffer)
        if self._epoch != process.epoch:  # perhaps of another scenario
            self._epoch, self._fold, self.twins = process.epoch, fresh(buffer), []
            entries_so_far: Any = MemoryStore(self.run.host.ledger).entries()
            for entry in itertools.islice(entries_so_far, len(self.run.host.ledger.entries) - len(entries)):
                self._fold.apply(entry)
        assert self._fold is not None
        for books in (self._fold, *self.twins):
            for entry in entries:
                books.apply(entry)
        self._compare(buffer, self._fold)

    def _compare(self, buffer: Buffer, fold: Books) -> None:
        snapshot = buffer.snapshot()
        if snapshot is None:
            return
        expected, opened = facts(fold), self.run.host.ledger.open

        def filled(record: GroupRecorded) -> GroupRecorded:
            return msgspec.structs.replace(record, payload=opened.get(record.group_id))

        read = decoded(1, encoded(snapshot)).snapshot
        assert read is not None
        assert read == snapshot
        assert all(group.record is None or group.record.payload is None for group in snapshot.groups)
        self.pairs.append(Pair(buffer, with_payloads(read, filled), expected))
        twin = restored(buffer, self.pairs[-1].snapshot)
        assert facts(twin) == expected
        twin.validate()
        for earlier in self.twins:
            assert facts(earlier) == expected
            self.num_compared += 1
        if len(self.pairs) % 9 == 1:
            self.twins = [*self.twins[-3:], twin]

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        raise AssertionError("not asked for")


def with_kills(trial: Trial) -> Trial:
    kills = (Fault(at_s=at_s, kind=FaultKind.KILL, target=BUFFER) for at_s in (3.0, 9.0, 21.0))
    return msgspec.structs.replace(trial, faults=(*trial.faults, *kills))


def plain_trials(policy: str) -> list[Trial]:
    """The first of this policy whose books can be kept."""
    drawn = (draw_trial(policy, seed) for seed in itertools.count())
    return [with_kills(trial) for trial in itertools.islice(filter(_is_kept, drawn), NUM_TRIALS)]


def _is_kept(trial: Trial) -> bool:
    chooses = trial.own_source or trial.row_choices or trial.has_priority or trial.replay or trial.sources
    return not chooses and trial.reuse == 1 and trial.only is None and not trial.num_recorded


def watched(trial: Trial) -> SnapshotWatch:
    run = TrialRun(trial, with_digest=False)
    watch = SnapshotWatch(run)
    run.run()
    return watch


@pytest.fixture(scope="module")
def watches() -> list[SnapshotWatch]:
    return [watched(trial) for policy in POLICIES for trial in plain_trials(policy)]


def test_at_every_commit_a_snapshot_gives_the_books_of_the_whole_fold_then_and_later(
    watches: list[SnapshotWatch],
) -> None:
    assert sum(len(watch.pairs) for watch in watches) > 500
    assert sum(watch.num_compared for watch in watches) > 500


def fields() -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(BooksSnapshot):
        if isinstance(field.type, type) and field.type.__name__.startswith("Kept"):
            yield from ((field.name, inner.name) for inner in msgspec.structs.fields(field.type))
        elif field.name != "settings":
            yield field.name, ""


def forgotten(pair: Pair, field: str, inner: str) -> BooksSnapshot:
    """The snapshot with what books have in this field before anything has happened."""
    begun = snapshot_of(fresh(pair.buffer))
    assert begun is not None
    value = getattr(begun, field)
    if inner:
        value = msgspec.structs.replace(getattr(pair.snapshot, field), **{inner: getattr(value, inner)})
    return msgspec.structs.replace(pair.snapshot, **{field: value})


@pytest.mark.parametrize(("field", "inner"), tuple(fields()))
def test_a_field_that_is_forgotten_gives_other_books(watches: list[SnapshotWatch], field: str, inner: str) -> None:
    for pair in (pair for watch in watches for pair in watch.pairs):
        try:
            if facts(restored(pair.buffer, forgotten(pair, field, inner))) != pair.facts:
                return
        except (AssertionError, KeyError):
            return
    raise AssertionError("nothing is missing without it: no trial comes to it, or no books need it")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_whose_buffers_begin_with_snapshots_is_the_same_to_the_last_event(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_with: list[bool] = []

    def counted(books: Books, records: Iterable[LedgerEntry], kept: KeptBooks | None) -> str:
        assert kept is not None
        begun_with.append(kept.snapshot is not None)
        return resume(books, records, kept)

    monkeypatch.setattr(buffer_machine, "resume", counted)
    for trial in plain_trials(policy)[:6]:
        plain, kept = TrialRun(trial), TrialRun(trial)
        plain.host.ledger.snapshot_every, kept.host.ledger.snapshot_every = 0, 3
        assert plain.run().digest == kept.run().digest
    assert sum(begun_with) >= 3


class TestWhereTheSnapshotCannotBeUsed:
    """The whole ledger is folded, and the new Buffer says why."""

    @pytest.fixture
    def ended(self) -> TrialRun:
        trial = next(trial for trial in plain_trials("fully_async") if not trial.requests and trial.num_steps > 3)
        run = TrialRun(msgspec.structs.replace(trial, keep_checkpoints=1, save_every=1), with_digest=False)
        run.host.ledger.snapshot_every = 1
        run.run()
        return run

    @staticmethod
    def resumed(run: TrialRun, kept: KeptBooks, **changed: int) -> tuple[Buffer, str]:
        """A new Buffer, and what it tells people when it starts."""
        old = run.host.supervisor.processes[BUFFER].shell.machine
        assert isinstance(old, Buffer)
        settings = msgspec.structs.replace(old.settings, **changed)
        buffer = Buffer(settings, old.policy, MemoryStore(run.host.ledger).entries(), kept=kept)
        commands = buffer.handle(Started(epoch=1))
        notices = [c.event.text for c in commands if isinstance(c, Send) and isinstance(c.event, NoticeGiven)]
        whole = Buffer(settings, old.policy, MemoryStore(run.host.ledger).entries())
        assert facts(buffer.books) == facts(whole.books)
        return buffer, " ".join(notices)

    def test_with_one_that_fits_it_says_nothing(self, ended: TrialRun) -> None:
        kept = MemoryStore(ended.host.ledger).kept_books()
        assert kept.snapshot is not None
        assert self.resumed(ended, kept)[1] == ""

    def test_under_other_settings(self, ended: TrialRun) -> None:
        kept = MemoryStore(ended.host.ledger).kept_books()
        buffer, said = self.resumed(ended, kept, keep_checkpoints=7)
        assert "whole ledger" in said
        assert "the scenario is another one" in said
        assert len(buffer.books.checkpoints) > 1

    def test_with_one_that_the_store_could_not_read(self, ended: TrialRun) -> None:
        _, said = self.resumed(ended, KeptBooks(None, (), "their snapshot is damaged"))
        assert said.endswith("whole ledger to make its books: their snapshot is damaged")
