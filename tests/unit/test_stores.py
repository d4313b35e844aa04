"""What every ledger store must do, and what only the file must do."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import msgspec
import pytest
from older_ledger import make_older

from penstock.backends.contracts.store import (
    Open,
    StoreContract,
    every_kind,
    failed,
    group,
    leased,
    payload_ids,
    recorded,
    trained,
)
from penstock.backends.ledger.memory import MemoryLedger, MemoryStore
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.sqlite import (
    ENTRIES_A_PAGE,
    PAGE_BYTES,
    SqliteReader,
    SqliteStore,
    open_read_only,
)
from penstock.backends.ledger.tables import SCHEMA_VERSION
from penstock.messages.ledger import (
    CheckpointRecorded,
    FailuresNoted,
    GroupClosed,
    GroupRecorded,
    PayloadsReleased,
    VersionRecorded,
)
from penstock.messages.samples import (
    Completed,
    Part,
    Sample,
    SampleKey,
    TerminalState,
    VersionSpan,
)

if TYPE_CHECKING:
    from pathlib import Path


TIMEOUT_S = 60


class TestMemory(StoreContract):
    @pytest.fixture
    def open_store(self) -> Open:
        ledger = MemoryLedger()
        return lambda: MemoryStore(ledger)


class TestSqlite(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Open:
        return lambda: SqliteStore(tmp_path / "ledger.sqlite")


# --- only the file ----------------------------------------------------------------------------------------------

COMMIT_FOREVER = """
    import sys
    from pathlib import Path
    from penstock.backends.ledger.sqlite import SqliteStore
    from penstock.messages.ledger import VersionRecorded
    store = SqliteStore(Path(sys.argv[1]))
    store.claim(1)
    version = 0
    while True:
        store.commit([VersionRecorded(version=version), VersionRecorded(version=version + 1)])
        version += 2
        print(version, flush=True)
"""


def test_what_was_committed_survives_a_kill_and_no_commit_is_half_there(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(COMMIT_FOREVER), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(20):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    acknowledged = 40 + 2 * child.communicate(timeout=TIMEOUT_S)[0].count("\n")
    store = SqliteStore(path)
    versions = [entry.version for entry in store.entries() if isinstance(entry, VersionRecorded)]
    assert versions == list(range(len(versions)))
    assert len(versions) % 2 == 0
    assert len(versions) >= acknowledged
    store.claim(2)


def test_the_file_is_in_wal_mode_and_synced(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "ledger.sqlite").close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_a_transaction_that_fails_leaves_nothing_and_the_store_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = SqliteStore(path)
    store.claim(1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(LedgerStoreError, match=r"ledger\.sqlite: the ledger cannot be written: no room"):
        store.commit(every_kind())
    other.execute("DROP TRIGGER full")
    other.close()
    assert not list(store.entries())
    store.commit([VersionRecorded(version=1)])
    assert list(store.entries()) == [VersionRecorded(version=1)]


def test_reasons_are_counted_by_kind_before_and_after_their_groups_end_and_no_sample_twice(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(1)
    early, late = failed(2, "ValueError: 7 (r.py:3)"), failed(2, "ValueError: 8 (r.py:3)", 1)
    filtered = msgspec.structs.replace(
        failed(3, "KeyError: 'a' (f.py:1)"), state=TerminalState.FILTERED, cause="filter"
    )
    store.commit([FailuresNoted(ends=(early,))])
    store.commit([GroupClosed(group_id=2, ended=(early, late)), GroupClosed(group_id=3, ended=(filtered,))])
    store.close()
    with contextlib.closing(open_read_only(tmp_path / "ledger.sqlite")) as database:
        assert database.execute("SELECT * FROM reason_counts").fetchall() == [
            ("failed", "scoring_failed", "ValueError (r.py:3)", 2, "ValueError: 7 (r.py:3)"),
            ("filtered", "filter", "KeyError (f.py:1)", 1, "KeyError: 'a' (f.py:1)"),
        ]


def test_a_ledger_of_the_form_before_reasons_is_read_as_it_is_and_upgraded_when_written_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = SqliteStore(path)
    store.claim(1)
    store.commit([VersionRecorded(version=1)])
    store.close()
    make_older(path, 3)
    with contextlib.closing(SqliteReader(path)) as reader:
        assert list(reader.entries()) == [VersionRecorded(version=1)]
    store = SqliteStore(path)
    store.claim(2)
    store.commit([FailuresNoted(ends=(failed(2, "ValueError: 7 (r.py:3)"),))])
    assert len(list(store.entries())) == 2
    store.close()
    with contextlib.closing(open_read_only(path)) as database:
        assert database.execute("SELECT num_samples FROM reason_counts").fetchall() == [(1,)]
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def damage(path: Path, statement: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE entries SET body = x'c1'", r"entry 1 \(VersionRecorded\) cannot be read"),
        ("PRAGMA user_version = 99", "a newer penstock wrote this ledger: it has form 99, this one reads form 8"),
        ("PRAGMA user_version = 1", "an older penstock wrote this ledger: it has form 1"),
    ],
)
def test_a_ledger_that_cannot_be_read_says_where(tmp_path: Path, statement: str, message: str) -> None:
    path = tmp_path / "ledger.sqlite"
    store = SqliteStore(path)
    store.claim(1)
    store.commit([VersionRecorded(version=1)])
    store.close()
    damage(path, statement)
    with pytest.raises(LedgerStoreError, match=message):
        list(SqliteStore(path).entries())


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("this is no database, " * 100)
    with pytest.raises(LedgerStoreError, match=r"ledger\.sqlite: the ledger cannot be opened: .*not a database"):
        SqliteStore(tmp_path / "ledger.sqlite")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerStoreError, match=r"the ledger cannot be opened: unable to open"):
        SqliteStore(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerStoreError, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "ledger.sqlite")
    assert not os.path.exists(tmp_path / "nowhere")


def test_a_reader_of_a_missing_file_makes_none(tmp_path: Path) -> None:
    with pytest.raises(LedgerStoreError, match=r"ledger\.sqlite: the ledger cannot be opened: unable to open"):
        SqliteReader(tmp_path / "ledger.sqlite")
    assert not list(tmp_path.iterdir())


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "ledger.sqlite").close()
    database = open_read_only(tmp_path / "ledger.sqlite")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.execute("DELETE FROM entries")
    database.close()


def test_a_reader_between_two_pages_holds_back_neither_writer_nor_truncation(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = SqliteStore(path)
    store.claim(1)
    store.commit([VersionRecorded(version=version) for version in range(2 * ENTRIES_A_PAGE)])
    entries = SqliteReader(path).entries()
    assert next(entries) == VersionRecorded(version=0)
    store.commit([VersionRecorded(version=-1)])
    other = sqlite3.connect(path, isolation_level=None)
    is_blocked, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    other.close()
    assert not is_blocked
    assert list(entries)[-1] == VersionRecorded(version=-1)


def test_a_full_file_refuses_the_whole_commit_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = SqliteStore(path, max_pages=64)
    store.claim(1)
    num_committed = 0
    with pytest.raises(LedgerStoreError, match="cannot be written: the disk is full"):  # noqa: PT012 - the one that fails
        while num_committed < 100_000:
            store.commit([recorded(num_committed + k) for k in range(50)])
            num_committed += 50
    assert 0 < num_committed < 100_000
    found = [entry.group_id for entry in SqliteReader(path).entries() if isinstance(entry, GroupRecorded)]
    assert found == list(range(num_committed))
    store.close()
    wider = SqliteStore(path)
    wider.claim(2)
    wider.commit([recorded(num_committed)])
    assert len(payload_ids(wider)) == num_committed + 1


NO_SPACE = """
    import resource, signal, sys
    from pathlib import Path
    from penstock.backends.ledger.protocol import LedgerStoreError
    from penstock.backends.ledger.sqlite import SqliteStore
    from penstock.messages.ledger import CheckpointRecorded
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = SqliteStore(Path(sys.argv[1]))
    store.claim(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    version = 0
    try:
        while True:
            store.commit([CheckpointRecorded(version=version + k, path="x" * 1000) for k in range(2)])
            version += 2
    except LedgerStoreError as error:
        print(version, error)
"""


def test_a_write_that_the_system_refuses_leaves_nothing_of_its_commit(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    command = [sys.executable, "-c", textwrap.dedent(NO_SPACE), str(path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    assert "the ledger cannot be written" in said
    versions = [entry.version for entry in SqliteReader(path).entries() if isinstance(entry, CheckpointRecorded)]
    assert versions == list(range(int(said.split()[0])))


def test_damage_in_the_middle_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = SqliteStore(path)
    store.claim(1)
    store.commit([CheckpointRecorded(version=version, path="x" * 1000) for version in range(200)])
    store.close()
    with path.open("r+b") as file:
        file.seek(3 * PAGE_BYTES)
        file.write(b"\xff" * (path.stat().st_size - 3 * PAGE_BYTES))
    with pytest.raises(LedgerStoreError, match=r"ledger\.sqlite: .*damaged"):
        list(SqliteReader(path).entries())


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    damage(tmp_path / "other.sqlite", "CREATE TABLE t (a)")
    with pytest.raises(LedgerStoreError, match=r"other\.sqlite: this file holds no ledger"):
        SqliteReader(tmp_path / "other.sqlite")


def test_the_claimed_epoch_can_be_asked_for(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.sqlite")
    assert store.claimed_epoch() == -1
    store.claim(1001)
    assert SqliteReader(tmp_path / "ledger.sqlite").claimed_epoch() == 1001


def test_the_tables_say_what_the_log_says(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(1)
    store.commit(every_kind())
    database = open_read_only(tmp_path / "ledger.sqlite")
    groups = database.execute("SELECT group_id, state, version, position FROM groups ORDER BY group_id").fetchall()
    assert groups == [(0, "trained", 1, 0), (1, "admitted", None, None), (2, "closed", None, None)]
    evaluated_ones = database.execute(
        "SELECT g.dataset_name, g.state, s.sample_index, s.state, s.reward, s.oldest_version FROM evaluation_groups g "
        "LEFT JOIN samples s USING (group_id) ORDER BY g.group_id DESC, s.sample_index"
    ).fetchall()
    assert evaluated_ones == [
        ("easy", "evaluated", 0, "evaluated", 0.5, 1),
        ("easy", "evaluated", 1, "failed", None, None),
        ("hard", "granted", None, None, None, None),
    ]
    query = "SELECT number, version, state, num_groups, num_samples, num_ended FROM evaluations"
    assert database.execute(query).fetchall() == [(0, 1, "open", 2, 4, 1)]
    query = "SELECT group_id, state, cause, num_tokens FROM samples WHERE group_id >= 0 ORDER BY group_id"
    samples = database.execute(query).fetchall()
    assert samples == [(0, "trained", "", 2), (1, None, None, 2), (2, "filtered", "zero_spread", 3)]
    assert database.execute("SELECT version, is_kept FROM checkpoints").fetchall() == [(1, 1)]
    balance = database.execute("SELECT * FROM balance ORDER BY state, cause").fetchall()
    assert balance == [
        ("evaluated", "", 1, 3),
        ("failed", "scoring_failed", 1, 2),
        ("filtered", "zero_spread", 1, 3),
        ("in the system", "admitted", 1, 2),
        ("in the system", "evaluation", 2, 0),
        ("in the system", "granted", 0, 0),
        ("trained", "", 1, 2),
    ]
    database.close()


def test_the_file_does_not_grow_with_payloads_that_were_released(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(1)
    tokens = bytes(40_000)
    part = Part(tokens=tokens, logprobs=tokens, spans=(VersionSpan(0, 10_000),))

    def train(version: int) -> None:
        big = Sample(key=SampleKey(version, 0), parts=(part,), outcome=Completed())
        entry = msgspec.structs.replace(
            recorded(version), payload=msgspec.structs.replace(group(version), samples=(big,))
        )
        store.commit([entry, leased(version, version), trained(version, version)])
        store.commit([PayloadsReleased(through_version=version - 2)])

    def num_pages() -> int:
        database = sqlite3.connect(tmp_path / "ledger.sqlite")
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.close()
        return int(pages)

    for version in range(10):
        train(version)
    before = num_pages()
    for version in range(10, 60):
        train(version)
    assert num_pages() <= before + 3
