"""An index of all samples of a run, so that a million of them can be filtered and sorted at once.

The ledger has them by group alone, and is the run's own: nothing is ever written to it. So what people filter and sort
by is copied into a file of its own, ``cache/samples.sqlite`` in the run's folder, with one covering index an order.
Where the folder cannot be written it lies in the user's cache folder. It may be deleted at any time.

Invariants:

* The log of the ledger says which groups have changed; of each of these the rows are copied as the ledger has them now.
  So the index holds what the ledger held after some entry, and going on from there costs what is new.
* Whoever asks for progress does a share of the work and returns; nothing goes on when nobody looks. A page is one
  transaction in the index and a short one in the ledger, which holds up nobody who writes there.
* A table is answered only when every order has its index: no question is ever answered by sorting a million rows.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.actors.scorer.reward_alarms import SMALLEST_SPREAD
from penstock.backends.ledger.sqlite import open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.user_cache import user_cache
from penstock.messages.errors import UserFault
from penstock.messages.evaluation import GroupEvaluated
from penstock.messages.ledger import GroupClosed, GroupRecorded, LedgerEntry, StepRecorded
from penstock.messages.samples import is_evaluation
from penstock.runtime.observability.samples import IN_THE_SYSTEM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORM: Final = 1
INDEX_FILE: Final = Path("cache", "samples.sqlite")
"""In the folder of a run."""
BUDGET_S: Final = 0.5
"""Of work for one who asks how far it is."""
GROUPS_A_PAGE: Final = 2000
_NO_SPREAD: Final = "zero_spread"
"""The Filter's cause for groups whose rewards are all the same: each is then the mean that the ledger keeps."""
ORDERS: Final = {
    "group": "group_id", "step": "step", "reward": "reward", "tokens": "num_tokens", "age": "age", "seconds": "seconds",
}  # fmt: skip
"""What samples can be sorted by, and the column of it."""
BY_KEY: Final = "sqlite_autoindex_samples_1"
"""SQLite's name for the table itself, which lies in the order of its key."""
_REST: Final = "fate, engine, step, reward, num_tokens, age, seconds, is_flat"
_TABLES: Final = f"""
CREATE TABLE source (only INTEGER PRIMARY KEY, began REAL, first_head INTEGER, sequence INTEGER) STRICT;
CREATE TABLE fates (fate INTEGER PRIMARY KEY, state TEXT, cause TEXT, UNIQUE (state, cause)) STRICT;
CREATE TABLE engines (engine INTEGER PRIMARY KEY, name TEXT UNIQUE) STRICT;
CREATE TABLE samples (group_id INTEGER, sample_index INTEGER, fate INTEGER NOT NULL, engine INTEGER, step INTEGER,
    reward REAL, num_tokens INTEGER NOT NULL, age INTEGER, seconds REAL, is_flat INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample_index)) STRICT, WITHOUT ROWID;
PRAGMA user_version = {FORM};
"""
INDEXES: Final = {
    "by_fate": f"CREATE INDEX by_fate ON samples (fate, group_id, sample_index, {_REST})",
    "flat": f"CREATE INDEX flat ON samples (group_id, sample_index, {_REST}) WHERE is_flat",
    **{
        f"by_{order}": f"CREATE INDEX by_{order} ON samples ({column}, group_id, sample_index, {_REST})"
        for order, column in ORDERS.items()
        if order != "group"
    },
}
"""Every column stands in every one of them, so that a condition on any costs no look at the table."""
_ENTRIES: Final = """
SELECT sequence, body FROM entries WHERE sequence > ? AND kind IN
    ('GroupRecorded', 'GroupClosed', 'GroupEvaluated', 'StepRecorded') ORDER BY sequence LIMIT ?
"""
_ROWS: Final = """
SELECT s.group_id, s.sample_index, coalesce(s.state, ?), coalesce(s.cause, ''), s.engine, s.version, s.reward,
    s.num_tokens, s.version - 1 - s.oldest_version,
    coalesce(g.ended_at - g.granted_at, v.ended_at - e.opened_at)
FROM samples s LEFT JOIN groups g USING (group_id) LEFT JOIN evaluation_groups v USING (group_id)
    LEFT JOIN evaluations e ON e.number = v.evaluation
WHERE s.group_id IN (SELECT value FROM json_each(?)) ORDER BY s.group_id
"""
_DECODER: Final[msgspec.msgpack.Decoder[LedgerEntry]] = msgspec.msgpack.Decoder(LedgerEntry)


class IndexState(msgspec.Struct, frozen=True, kw_only=True):
    """How far the index is."""

    is_ready: bool
    """Whether it can be asked; it may lack what has been new since."""
    is_waiting: bool = False
    """There is no ledger yet, so nothing can be done."""
    doing: str
    """What is being done, in words; empty when it has everything."""
    share: float
    """Of the ledger's log that is in it."""
    num_samples: int
    file: str


class _Page(NamedTuple):
    sequence: int
    """The newest entry that it covers."""
    head: int
    groups: list[int]
    rewards: dict[int, float]
    """Of groups without spread that were turned away."""
    rows: list[tuple[int, int, str, str, str | None, int | None, float | None, int, int | None, float | None]]


def index_file(run_folder: Path) -> Path:
    """Where the index of a run is, or will be."""
    if os.access(run_folder, os.W_OK):
        return run_folder / INDEX_FILE
    name = hashlib.blake2b(str(run_folder.resolve()).encode(), digest_size=8).hexdigest()
    return user_cache(f"an index of {run_folder}, which is read-only") / "dashboard" / name / INDEX_FILE.name


def open_index(run_folder: Path) -> sqlite3.Connection:
    """The index, to be asked.

    Raises:
        UserFault: it is not complete yet.
    """
    file = index_file(run_folder)
    if file.is_file():
        database = open_read_only(file)
        if _missing_index(database) is None:
            return database
        database.close()
    raise UserFault("the index of samples is not complete yet; the Samples view shows how far it is")


def advance(run_folder: Path, budget_s: float = BUDGET_S) -> IndexState:
    """Bring the index some way towards what the ledger says now; to be called again while it is not there.

    Raises:
        UserFault: one of the files cannot be read or written.
    """
    ends_s = time.monotonic() + budget_s
    file = index_file(run_folder)
    if not (run_folder / LEDGER_FILE).is_file():
        waits = "The run has no ledger: its Buffer has not started, or the folder is not whole."
        return IndexState(is_ready=False, is_waiting=True, doing=waits, share=0.0, num_samples=0, file=str(file))
    try:
        with closing(open_read_only(run_folder / LEDGER_FILE)) as ledger, closing(_opened(file, ledger)) as index:
            try:
                _work(ledger, index, ends_s)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise  # otherwise somebody else is at it, and this one tells how far
            return _state(ledger, index, file)
    except (sqlite3.Error, OSError) as error:
        raise UserFault(f"{file}: the index of samples cannot be made: {error}. Delete it if it is damaged") from None


def _work(ledger: sqlite3.Connection, index: sqlite3.Connection, ends_s: float) -> None:
    while has_more := _copy_page(ledger, index):
        if time.monotonic() > ends_s:
            break
    while not has_more and (name := _missing_index(index)) and time.monotonic() < ends_s:
        index.execute(INDEXES[name])


def _opened(file: Path, ledger: sqlite3.Connection) -> sqlite3.Connection:
    """The file of this very ledger; of another one, or of another form, it is begun anew."""
    row = ledger.execute("SELECT written_at, (SELECT max(sequence) FROM entries) FROM entries WHERE sequence = 1")
    began, head = row.fetchone() or (0.0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():  # a folder that somebody else has made may point anywhere
        file.unlink()
    index = _connected(file)
    try:
        if not _is_of(index, began, head):
            index.close()
            for name in (file.name, f"{file.name}-wal", f"{file.name}-shm"):
                file.with_name(name).unlink(missing_ok=True)
            index = _connected(file)
        index.execute("PRAGMA synchronous = OFF")  # what a crash of the machine spoils is made again
        index.execute("PRAGMA cache_size = -65536")
        if index.execute("PRAGMA user_version").fetchone() == (0,):
            index.execute("PRAGMA journal_mode = WAL")
            index.executescript(
                f"BEGIN IMMEDIATE; {_TABLES} INSERT INTO source VALUES (0, {began!r}, {head}, 0); COMMIT"
            )
    except BaseException:
        index.close()
        raise
    return index


def _connected(file: Path) -> sqlite3.Connection:
    """Without patience: who finds somebody else at work tells how far that one is."""
    return sqlite3.connect(file, timeout=0.0, isolation_level=None)


def _is_of(index: sqlite3.Connection, began: float, head: int) -> bool:
    """Whether it is empty, or was made from this ledger in this form."""
    try:
        (form,) = index.execute("PRAGMA user_version").fetchone()
        if form != FORM:
            return bool(form == 0)
        row = index.execute("SELECT began = ? AND sequence <= ? FROM source", (began, head)).fetchone()
        return bool(row == (1,))
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False  # no file of SQLite


def _copy_page(ledger: sqlite3.Connection, index: sqlite3.Connection) -> bool:
    """Copy what the next entries of the log have changed; whether there may be more."""
    index.execute("BEGIN IMMEDIATE")
    try:
        sequence, first_head = index.execute("SELECT sequence, first_head FROM source").fetchone()
        page = _read_page(ledger, sequence, first_head)
        if page.groups:
            groups = msgspec.json.encode(page.groups).decode()
            index.execute("DELETE FROM samples WHERE group_id IN (SELECT value FROM json_each(?))", (groups,))
            index.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _index_rows(page, index))
        if page.sequence > sequence:
            index.execute("UPDATE source SET sequence = ?", (page.sequence,))
        index.execute("COMMIT")
    except BaseException:
        index.execute("ROLLBACK")
        raise
    return page.sequence < page.head


def _read_page(ledger: sqlite3.Connection, after: int, first_head: int) -> _Page:
    """The rows of the groups that the next entries name, as they are now."""
    ledger.execute("BEGIN")
    try:
        (head,) = ledger.execute("SELECT coalesce(max(sequence), 0) FROM entries").fetchone()
        entries = ledger.execute(_ENTRIES, (after, GROUPS_A_PAGE)).fetchall()
        groups: dict[int, float | None] = {}
        for sequence, body in entries:
            match _DECODER.decode(body):
                case GroupRecorded(group_id=group_id) | GroupEvaluated(group_id=group_id):
                    groups[group_id] = None
                case GroupClosed(group_id=group_id, rejected_cause=cause, mean_reward=mean):
                    groups[group_id] = mean if cause == _NO_SPREAD else None
                # The groups of an older step were copied as that step had left them.
                case StepRecorded(group_ids=group_ids) if sequence > first_head:
                    groups |= dict.fromkeys(group_ids)
                case _:
                    pass
        rows = ledger.execute(_ROWS, (IN_THE_SYSTEM, msgspec.json.encode(list(groups)).decode())).fetchall()
    finally:
        ledger.execute("COMMIT")
    covered = entries[-1][0] if len(entries) == GROUPS_A_PAGE else head
    return _Page(covered, head, list(groups), {g: mean for g, mean in groups.items() if mean is not None}, rows)


def _index_rows(page: _Page, index: sqlite3.Connection) -> Iterator[tuple[int | float | None, ...]]:
    fates = _numbered(index, "fates (state, cause)", {(row[2], row[3]) for row in page.rows})
    engines = _numbered(index, "engines (name)", {(row[4],) for row in page.rows if row[4]})
    for group_id, rows in groupby(page.rows, key=lambda row: row[0]):
        samples = list(rows)
        known = page.rewards.get(group_id)
        rewards = [known if row[6] is None and row[3] == _NO_SPREAD else row[6] for row in samples]
        given = [reward for reward in rewards if reward is not None]
        is_flat = not is_evaluation(group_id) and len(given) > 1 and max(given) - min(given) < SMALLEST_SPREAD
        for row, reward in zip(samples, rewards, strict=True):
            engine = engines.get((row[4],))
            yield (group_id, row[1], fates[row[2], row[3]], engine, row[5], reward, *row[7:], is_flat)


def _numbered(
    index: sqlite3.Connection, table: str, found: Iterable[tuple[str | None, ...]]
) -> dict[tuple[str | None, ...], int]:
    """The number of each of these words, in a table that keeps them."""
    places = ", ".join("?" for _ in table.split(","))
    index.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({places})", found)
    return {row[1:]: row[0] for row in index.execute(f"SELECT * FROM {table.partition(' ')[0]}")}


def _missing_index(index: sqlite3.Connection) -> str | None:
    made = {name for (name,) in index.execute("SELECT name FROM sqlite_schema WHERE type = 'index'")}
    return next((name for name in INDEXES if name not in made), None)


def _state(ledger: sqlite3.Connection, index: sqlite3.Connection, file: Path) -> IndexState:
    (head,) = ledger.execute("SELECT coalesce(max(sequence), 0) FROM entries").fetchone()
    (sequence,) = index.execute("SELECT sequence FROM source").fetchone() or (0,)
    missing = _missing_index(index)
    doing = f"sorting {missing.replace('_', ' ')}" if missing else ""
    (num_samples,) = index.execute("SELECT count(*) FROM samples").fetchone()
    return IndexState(
        is_ready=missing is None,
        doing="reading the ledger" if sequence < head else doing,
        share=1.0 if head == 0 else sequence / head,
        num_samples=num_samples,
        file=str(file),
    )
