"""The snapshot of the Buffer's books in a ledger file: when it is written, when it is not used, and its audit."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest
from older_ledger import make_older
from test_audit import Copyist
from trials.draws import draw_trial
from trials.fuzz import TrialRun

from penstock.actors.buffer.books import Books
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.snapshots import resume, snapshot_of
from penstock.backends.ledger import kept_books, sqlite
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.kept_books import FoundSnapshot, encoded, read_snapshot, write_snapshot
from penstock.backends.ledger.protocol import StaleEpochError
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.messages.ledger import BatchLeased, GroupRecorded, PolicyRecorded, VersionRecorded
from penstock.messages.names import BUFFER
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.messages.books import BooksSnapshot

Change = dict[str, object]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Buffer]:
    """The ledger of a trial, with a snapshot from the middle of it; and the Buffer of its end."""
    path = tmp_path_factory.mktemp("run") / "ledger.sqlite"
    with pytest.MonkeyPatch.context() as patch, closing(SqliteStore(path)) as store:
        patch.setattr(sqlite, "SNAPSHOT_EVERY", 10)
        run = TrialRun(draw_trial("fully_async", 57), with_digest=False)
        run.host.watch(Copyist(store), events=False)
        run.run()
        buffer = run.host.supervisor.processes[BUFFER].shell.machine
    assert isinstance(buffer, Buffer)
    return path, buffer


@pytest.fixture
def path(written: tuple[Path, Buffer], tmp_path: Path) -> Path:
    """A copy that may be changed."""
    with closing(sqlite3.connect(written[0])) as source, closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as copy:
        source.backup(copy)
    return tmp_path / "ledger.sqlite"


def changed(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def found(path: Path) -> FoundSnapshot:
    with closing(sqlite3.connect(path)) as database:
        return read_snapshot(database)


def rewritten(path: Path, **fields: object) -> None:
    """The snapshot with other fields, and with a digest that fits."""
    was = found(path)
    assert was.snapshot is not None
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        write_snapshot(database, was.sequence, msgspec.structs.replace(was.snapshot, **fields))


def books_of(buffer: Buffer) -> Books:
    return Books(buffer.settings, buffer.policy)


def test_a_new_buffer_reads_the_entries_after_the_snapshot_with_the_payloads_that_are_needed(
    path: Path, written: tuple[Path, Buffer]
) -> None:
    with closing(SqliteStore(path)) as store:
        kept, entries = store.kept_books(), list(store.entries())
        assert kept.snapshot is not None
        later = list(kept.later)
        assert 0 < len(later) < len(entries)
        assert later == entries[-len(later) :]
        whole, short = books_of(written[1]), books_of(written[1])
        assert not resume(whole, entries, None)
        assert not resume(short, (), kept._replace(later=later))
        assert encoded(must(snapshot_of(short))) == encoded(must(snapshot_of(whole)))


def must(snapshot: BooksSnapshot | None) -> BooksSnapshot:
    assert snapshot is not None
    return snapshot


def test_open_groups_have_their_payloads(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        came = {e.group_id: e.payload for e in store.entries() if isinstance(e, GroupRecorded)}
        groups = must(store.kept_books().snapshot).groups
        records = [group.record for group in groups if group.record is not None]
        assert records
        assert all(record.payload == came[record.group_id] for record in records)
        (num_open,) = sqlite3.connect(path).execute("SELECT count(*) FROM groups WHERE state = 'granted'").fetchone()
        assert num_open == 0, "the run has ended, so no payload is needed"
        changed(path, "UPDATE groups SET state = 'leased' WHERE group_id IN (SELECT group_id FROM payloads)")
        held = {row[0] for row in sqlite3.connect(path).execute("SELECT group_id FROM payloads")}
        filled = [g.record for g in must(store.kept_books().snapshot).groups if g.record and g.group_id in held]
        assert all(record.payload is not None for record in filled)


def test_it_is_written_with_the_entries_that_it_covers_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(sqlite, "SNAPSHOT_EVERY", 3)
    snapshot = msgspec.structs.replace(must(found(path).snapshot), groups=(), ready=())
    with closing(SqliteStore(tmp_path / "new.sqlite")) as store:
        store.claim(1)
        sequences: list[int] = []
        for version in range(8):
            store.commit([VersionRecorded(version=version)], lambda: snapshot)
            sequences.append(found(tmp_path / "new.sqlite").sequence)
        assert sequences == [0, 0, 3, 3, 3, 6, 6, 6]
        with closing(SqliteStore(tmp_path / "new.sqlite")) as other:
            other.claim(2)
            with pytest.raises(StaleEpochError):
                store.commit([VersionRecorded(version=9)], lambda: snapshot)
            other.kept_books()
            other.commit([VersionRecorded(version=9)], lambda: None)
            assert found(tmp_path / "new.sqlite").sequence == 6


UNUSABLE: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "another form": (("UPDATE snapshot SET form = 0",), r"their snapshot has form 0, this penstock reads form", False),
    "a body that was changed": (("UPDATE snapshot SET body = x'80'",), "their snapshot is damaged", True),
    "another entry": (("UPDATE snapshot SET sequence = sequence - 1",), "their snapshot is damaged", True),
    "no digest": (("UPDATE snapshot SET digest = x''",), "their snapshot is damaged", True),
    "entries that are gone": (("DELETE FROM entries WHERE sequence > 8",), r"of entry \d+, the last is 8", True),
    "none": (("DELETE FROM snapshot",), "it has no snapshot of them", False),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_one_that_cannot_be_used_is_left_alone_with_a_reason(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_books, "SNAPSHOT_EVERY", 9)
    statements, reason, is_wrong = UNUSABLE[name]
    changed(path, *statements)
    with closing(SqliteStore(path)) as store:
        kept = store.kept_books()
        assert kept.snapshot is None
        assert list(kept.later) == list(store.entries())

    assert re.search(reason, kept.problem)
    assert found(path).is_wrong is is_wrong
    if name != "entries that are gone":
        named = [finding.text for finding in audit_ledger(path).findings if "the Buffer's books" in finding.text]
        assert bool(named) is is_wrong


def test_one_that_is_no_snapshot_is_named(path: Path) -> None:
    body, sequence = msgspec.msgpack.encode({"settings": 1}), found(path).sequence
    digest = hashlib.sha256(sequence.to_bytes(8, "big") + body).hexdigest()
    changed(path, f"UPDATE snapshot SET body = x'{body.hex()}', digest = x'{digest}'")
    assert found(path).problem.startswith("their snapshot cannot be read: Expected `str`")


def test_a_short_ledger_has_none_and_nobody_is_told(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "ledger.sqlite")) as store:
        assert store.kept_books().problem == ""


@pytest.mark.parametrize("form", [5, 6])
def test_a_ledger_of_an_older_form_has_none_until_it_is_written_on(path: Path, form: int) -> None:
    make_older(path, form)
    assert not audit_ledger(path).findings
    with closing(SqliteStore(path)) as store:
        assert store.kept_books().snapshot is None


def inner(field: str, **fields: object) -> Callable[[BooksSnapshot], Change]:
    return lambda snapshot: {field: msgspec.structs.replace(getattr(snapshot, field), **fields)}


def first_group(**fields: object) -> Callable[[BooksSnapshot], Change]:
    return lambda was: {"groups": (msgspec.structs.replace(was.groups[0], **fields), *was.groups[1:])}


WRONG: dict[str, Callable[[BooksSnapshot], Change]] = {
    "the run": lambda was: {"identity": msgspec.structs.replace(was.identity, seed=99) if was.identity else 0},
    "the version": lambda was: {"version": was.version + 1},
    "the announced version": lambda _: {"announced": None},
    "released payloads": lambda was: {"released_through": was.released_through + 1},
    "checkpoints": lambda was: {"checkpoints": was.checkpoints[1:]},
    "leases": lambda _: {
        "leases": (BatchLeased(version=1, group_ids=(0,), max_staleness=9, update_mode=UpdateMode.DRAIN),)
    },
    "trained groups": lambda was: {"num_trained_groups": was.num_trained_groups - 1},
    "the oldest trained token": lambda _: {"max_staleness_seen": 77},
    "the pause": lambda was: {"is_paused": not was.is_paused},
    "the policy": lambda _: {
        "policy": PolicyRecorded(policy="sync", max_staleness=7, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)
    },
    "granted groups": inner("grants", total=1),
    "granted prompts": inner("grants", next_ordinal=1),
    "open groups": lambda was: {"groups": was.groups[1:]},
    r"group \d+": first_group(deadline_version=99),
    "ready groups": lambda _: {"ready": (0,)},
    "groups that are not settled": inner("settled", above=()),
    "the balance": inner("balance", issued=1),
    "the next evaluation": inner("evaluations", number=9),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_audit_finds_a_snapshot_that_differs_from_the_log(path: Path, what: str) -> None:
    was = must(found(path).snapshot)
    rewritten(path, **WRONG[what](was))
    texts = [finding.text for finding in audit_ledger(path).findings]

    assert any(re.search(f"the snapshot of the Buffer's books at entry \\d+ says of {what}: ", text) for text in texts)


def test_the_audit_finds_nothing_in_one_that_agrees(path: Path) -> None:
    assert found(path).snapshot is not None
    assert not audit_ledger(path).findings
