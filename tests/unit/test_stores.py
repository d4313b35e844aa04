"""What every ledger store must do, and what only the file must do."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Protocol

import pytest

from penstock.backends.stores.memory import MemoryLedger, MemoryStore
from penstock.backends.stores.protocol import LedgerStoreError, StaleEpochError
from penstock.backends.stores.sqlite import SqliteStore
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.flow import GrantSpan
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    LedgerEntry,
    PolicyRecorded,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    VersionSpan,
)
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.stores.protocol import LedgerStore

TIMEOUT_S = 60


class Open(Protocol):
    """Opens one more handle on the same ledger."""

    def __call__(self) -> LedgerStore: ...


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "memory":
        ledger = MemoryLedger()
        return lambda: MemoryStore(ledger)
    return lambda: SqliteStore(tmp_path / "ledger.sqlite")


def sample(group_id: int, index: int) -> Sample:
    part = Part(tokens=pack_tokens([5, 6]), logprobs=pack_floats([-0.5, -1.5]), spans=(VersionSpan(3, 2),))
    return Sample(key=SampleKey(group_id, index), parts=(part,), outcome=Completed(reward=Reward(value=0.5)))


def every_kind() -> list[LedgerEntry]:
    group = Group(group_id=1, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([1])), samples=(sample(1, 0),))
    ended = (SampleEnd(key=SampleKey(2, 0), state=TerminalState.FILTERED, cause="zero_spread", num_tokens=3),)
    return [
        GroupsGranted(span=GrantSpan(0, 2, 0, 0, 2), total=2),
        GroupRecorded(group=group, deadline_version=3),
        GroupClosed(group_id=2, ended=ended),
        BatchLeased(version=1, group_ids=(1,)),
        StepRecorded(version=1, group_ids=(1,), num_trained_tokens=2, max_staleness=0),
        CheckpointRecorded(version=1, path="checkpoints/1"),
        VersionRecorded(version=1),
        PolicyRecorded(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT),
    ]


def test_entries_of_every_kind_come_back_in_order_to_any_handle(open_store: Open) -> None:
    store = open_store()
    store.claim(1)
    store.commit(every_kind()[:3])
    store.commit([])
    store.commit(every_kind()[3:])
    assert list(store.entries()) == every_kind()
    assert list(open_store().entries()) == every_kind()


def test_nothing_is_written_without_a_claim(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(StaleEpochError, match="not claimed"):
        store.commit([VersionRecorded(version=1)])
    assert not list(store.entries())


@pytest.mark.parametrize("epoch", [3, 2, 0])
def test_a_claim_must_be_above_the_last_one(open_store: Open, epoch: int) -> None:
    open_store().claim(3)
    with pytest.raises(StaleEpochError, match=f"epoch {epoch} is not above"):
        open_store().claim(epoch)


def test_an_older_incarnation_writes_nothing_after_a_newer_one_has_claimed(open_store: Open) -> None:
    old, new = open_store(), open_store()
    old.claim(1)
    old.commit([VersionRecorded(version=1)])
    new.claim(2)
    with pytest.raises(StaleEpochError, match="this is epoch 1"):
        old.commit([VersionRecorded(version=2)])
    new.commit([VersionRecorded(version=3)])
    assert list(open_store().entries()) == [VersionRecorded(version=1), VersionRecorded(version=3)]


def test_a_refused_claim_leaves_the_claimant_in_place(open_store: Open) -> None:
    holder, other = open_store(), open_store()
    holder.claim(2)
    with pytest.raises(StaleEpochError):
        other.claim(1)
    holder.commit([VersionRecorded(version=1)])
    assert list(holder.entries()) == [VersionRecorded(version=1)]


def test_a_closed_handle_may_be_closed_again(open_store: Open) -> None:
    store = open_store()
    store.claim(1)
    store.close()
    store.close()
    with pytest.raises(LedgerStoreError):
        store.commit([VersionRecorded(version=1)])


COMMIT_FOREVER = """
    import sys
    from pathlib import Path
    from penstock.backends.stores.sqlite import SqliteStore
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
    other.execute("CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    with pytest.raises(LedgerStoreError, match=r"ledger\.sqlite: the ledger cannot be written: disk is full"):
        store.commit(every_kind())
    other.execute("DROP TRIGGER full")
    other.close()
    assert not list(store.entries())
    store.commit([VersionRecorded(version=1)])
    assert list(store.entries()) == [VersionRecorded(version=1)]


def damage(path: Path, statement: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE entries SET body = x'c1'", r"entry 1 \(VersionRecorded\) cannot be read"),
        ("PRAGMA user_version = 99", "has form 99"),
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
