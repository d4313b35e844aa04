"""A ledger in one SQLite file: a write-ahead log, synced on every commit.

Invariants:

* The epoch is checked in the transaction that writes, so a stale writer cannot slip in between.
* The log, the payloads and the tables for people (``tables.py``) change in one transaction.
* A reader pages through the log in short transactions. It never holds up the writer, and holds back the truncation of
  the write-ahead log for one page only. A page is consistent in itself: the payload of an open group is in it.
* All who have the file open are on one machine: WAL needs shared memory between them, which network file systems do not
  give.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.kept_books import SNAPSHOT_EVERY, read_snapshot, with_payloads, write_snapshot
from penstock.backends.ledger.projection import Projection
from penstock.backends.ledger.protocol import LedgerStoreError, PayloadGoneError, StaleEpochError
from penstock.backends.ledger.tables import (
    CLOSED,
    LEDGER_FILE,
    OLDER_READABLE,
    SCHEMA_VERSION,
    TRAINED,
    schema_statements,
    upgrade_statements,
)
from penstock.messages.base import UNREADABLE
from penstock.messages.books import KeptBooks
from penstock.messages.errors import UserFault
from penstock.messages.ledger import GroupRecorded, LedgerEntry, StepRecorded
from penstock.messages.samples import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from penstock.messages.books import BooksSnapshot

BUSY_TIMEOUT_S: Final = 10.0
PAGE_BYTES: Final = 16384
"""A payload of some ten kilobytes takes few pages, and the small rows of a commit do not touch too much."""
WAL_PAGES: Final = 512
"""Pages in the write-ahead log after which they are copied to the file: few, so that no commit waits long for it."""
ENTRIES_A_PAGE: Final = 256
IN_MEMORY: Final = ":memory:"
MEMORY_VARIABLE: Final = "PENSTOCK_LEDGER"
"""Of the environment. ``:memory:`` makes a ledger that is lost with its process: for measuring what the disk costs."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[LedgerEntry]] = msgspec.msgpack.Decoder(LedgerEntry)
_GROUP_DECODER: Final = msgspec.msgpack.Decoder(Group)


class SqliteReader:
    """A handle on a ledger file that cannot write. The file may be in use by others."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            LedgerStoreError: there is no such ledger, or this penstock cannot read it.
        """
        self._path: Path | str = path
        with self._named("opened"):
            self._database = open_read_only(path)
        self._check()

    def entries(self, after: int = 0) -> Iterator[LedgerEntry]:
        """See :class:`~penstock.backends.ledger.protocol.LedgerReader`; ``after``: the number of an entry."""
        last = after
        while page := self._page(last):
            last = page[-1][0]
            for _, entry in page:
                yield entry

    def payloads(self, group_ids: Sequence[int]) -> tuple[Group, ...]:
        """See :class:`~penstock.backends.ledger.protocol.LedgerReader`."""
        with self._named("read"):
            return tuple(self._payload(group_id) for group_id in group_ids)

    def receipts(self, first_version: int, last_version: int) -> tuple[StepRecorded, ...]:
        """See :class:`~penstock.backends.ledger.protocol.LedgerReader`."""
        query = (
            "SELECT e.sequence, e.kind, e.body FROM steps s JOIN entries e USING (sequence) "
            "WHERE s.version BETWEEN ? AND ? ORDER BY s.version"
        )
        with self._named("read"):
            rows = self._database.execute(query, (first_version, last_version)).fetchall()
        entries = (self._entry(*row) for row in rows)
        return tuple(entry for entry in entries if isinstance(entry, StepRecorded))

    def claimed_epoch(self) -> int:
        """Of the newest claimant; −1 when nobody has claimed the ledger yet."""
        with self._named("read"):
            return self._claimed()

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _check(self) -> None:
        try:
            with self._named("opened"):
                (form,) = self._database.execute("PRAGMA user_version").fetchone()
                if form not in (*OLDER_READABLE, SCHEMA_VERSION):
                    raise LedgerStoreError(_wrong_form(self._path, form))
        except LedgerStoreError:
            self._database.close()
            raise

    def _page(self, after: int) -> list[tuple[int, LedgerEntry]]:
        with self._named("read"), self._transaction("BEGIN"):
            rows = self._database.execute(
                "SELECT sequence, kind, body FROM entries WHERE sequence > ? ORDER BY sequence LIMIT ?",
                (after, ENTRIES_A_PAGE),
            ).fetchall()
            return [(row[0], self._with_payload(self._entry(*row))) for row in rows]

    def _entry(self, sequence: int, kind: str, body: bytes) -> LedgerEntry:
        try:
            return _DECODER.decode(body)
        except UNREADABLE as error:
            raise LedgerStoreError(
                f"{self._path}: entry {sequence} ({kind}) cannot be read: {error}. The file is damaged, or a newer "
                "penstock wrote it"
            ) from error

    def _with_payload(self, entry: LedgerEntry) -> LedgerEntry:
        return self._filled(entry) if isinstance(entry, GroupRecorded) else entry

    def _filled(self, entry: GroupRecorded) -> GroupRecorded:
        group_id = entry.group_id
        row = self._database.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if row is not None and row[0] in (TRAINED, CLOSED):
            return entry
        return msgspec.structs.replace(entry, payload=self._payload(group_id))

    def _payload(self, group_id: int) -> Group:
        row = self._database.execute("SELECT body FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
        if row is None:
            raise PayloadGoneError(
                f"{self._path}: the payload of group {group_id} was never recorded or has been released"
            )
        try:
            return _GROUP_DECODER.decode(row[0])
        except UNREADABLE as error:
            raise PayloadGoneError(
                f"{self._path}: the payload of group {group_id} cannot be read: {error}. The file is damaged"
            ) from error

    def _claimed(self) -> int:
        (epoch,) = self._database.execute("SELECT max(epoch) FROM claims").fetchone()
        return -1 if epoch is None else int(epoch)

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Generator[None]:
        self._database.execute(begin)
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            # A failed COMMIT (disk full) leaves the transaction open; ROLLBACK fails when SQLite has done it itself.
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _named(self, action: str) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise LedgerStoreError(f"{self._path}: the ledger cannot be {action}: {_story(error)}") from error


class SqliteStore(SqliteReader):
    """A handle on the ledger in ``path``, which is made if it is missing."""

    def __init__(self, path: Path | str, *, max_pages: int | None = None) -> None:
        """
        Args:
            path: the file; ``":memory:"`` for a ledger that is lost with this handle.
            max_pages: the file cannot grow beyond so many pages of ``PAGE_BYTES``; for tests of a full disk.
        """
        self._path = path
        self._epoch: int | None = None
        with self._named("opened"):
            # Autocommit mode: every transaction in here is begun and ended by hand.
            self._database = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        try:
            with self._named("opened"):
                self._prepare(max_pages)
        except LedgerStoreError:
            self._database.close()
            raise
        self._projection = Projection(self._database)
        self._kept_through = 0
        """The last entry that the snapshot covers."""

    def claim(self, epoch: int) -> None:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        with self._named("claimed"), self._transaction("BEGIN IMMEDIATE"):
            if (claimed := self._claimed()) >= epoch:
                raise StaleEpochError(
                    f"{self._path}: claimed with epoch {claimed}; epoch {epoch} is not above it. Another process "
                    "drives this run, or has driven it since"
                )
            self._database.execute("INSERT INTO claims VALUES (?, ?)", (epoch, time.time()))
        self._epoch = epoch

    def kept_books(self) -> KeptBooks:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        with self._named("read"), self._transaction("BEGIN"):
            found = read_snapshot(self._database)
            snapshot = None if found.snapshot is None else with_payloads(found.snapshot, self._filled)
        self._kept_through = found.sequence
        return KeptBooks(snapshot, self.entries(found.sequence), found.problem)

    def commit(
        self, entries: Sequence[LedgerEntry], snapshot: Callable[[], BooksSnapshot | None] | None = None
    ) -> None:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        if self._epoch is None:
            raise StaleEpochError(f"{self._path}: the ledger was not claimed by this handle")
        now_s = time.time()
        with self._named("written"), self._transaction("BEGIN IMMEDIATE"):
            if (claimed := self._claimed()) != self._epoch:
                raise StaleEpochError(f"{self._path}: claimed with epoch {claimed}; this is epoch {self._epoch}")
            (last,) = self._database.execute("SELECT coalesce(max(sequence), 0) FROM entries").fetchone()
            numbered = list(zip(itertools.count(last + 1), entries, strict=False))
            rows = [(n, self._epoch, now_s, type(entry).__name__, _body(entry)) for n, entry in numbered]
            self._database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
            for sequence, entry in numbered:
                self._projection.apply(sequence, entry, now_s)
            if snapshot is not None and last + len(entries) - self._kept_through >= SNAPSHOT_EVERY:
                self._keep(last + len(entries), snapshot())

    def reader(self) -> SqliteReader:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        if not isinstance(self._path, Path):
            raise LedgerStoreError("a ledger in memory has one handle")
        return SqliteReader(self._path)

    def close(self) -> None:
        """Let go of the file."""
        self._epoch = None
        super().close()

    def _keep(self, sequence: int, snapshot: BooksSnapshot | None) -> None:
        if snapshot is not None:
            write_snapshot(self._database, sequence, snapshot)
            self._kept_through = sequence

    def _prepare(self, max_pages: int | None) -> None:
        execute = self._database.execute
        execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a file that is made now; an older one keeps its own
        (mode,) = execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal" and self._path != IN_MEMORY:
            raise LedgerStoreError(
                f"{self._path}: SQLite cannot use a write-ahead log here (it stays in mode {mode}). Put the run's "
                "folder on a local disk (run.folder)"
            )
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA secure_delete = OFF")  # some builds overwrite what is deleted, which doubles what is written
        execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        if max_pages is not None:
            execute(f"PRAGMA max_page_count = {max_pages}")
        with self._transaction("BEGIN IMMEDIATE"):
            (form,) = execute("PRAGMA user_version").fetchone()
            if form not in (0, *OLDER_READABLE, SCHEMA_VERSION):
                raise LedgerStoreError(_wrong_form(self._path, form))
            if form != SCHEMA_VERSION:
                for statement in upgrade_statements(form) if form else schema_statements():
                    execute(statement)
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def open_ledger(run_folder: Path) -> SqliteStore:
    """The ledger of a run, made if it is missing.

    Raises:
        LedgerStoreError: it cannot be opened.
    """
    return SqliteStore(IN_MEMORY if os.environ.get(MEMORY_VARIABLE) == IN_MEMORY else run_folder / LEDGER_FILE)


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that can change nothing and make no file, with the function ``entry_json``.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        database.execute("PRAGMA query_only = ON")
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # ATTACH and VACUUM INTO would make files all the same
        database.create_function("entry_json", 1, _entry_json, deterministic=True)
    except sqlite3.Error:
        database.close()
        raise
    return database


@contextlib.contextmanager
def asked_ledger(path: Path) -> Generator[sqlite3.Connection]:
    """A connection as of :func:`open_read_only`, for who looks at a run; it is closed behind the block.

    Raises:
        UserFault: what lies there cannot be read, as may be seen within the block.
    """
    try:
        with contextlib.closing(open_read_only(path)) as database:
            if not database.execute("PRAGMA user_version").fetchone()[0]:
                raise UserFault(_wrong_form(path, 0))
            yield database
    except sqlite3.Error as error:
        raise UserFault(f"{path}: the ledger cannot be read: {_story(error)}") from None


def _entry_json(body: bytes) -> str:
    return msgspec.json.encode(msgspec.msgpack.decode(body)).decode()


def _body(entry: LedgerEntry) -> bytes:
    if isinstance(entry, GroupRecorded):
        entry = entry.without_payload()
    return _ENCODER.encode(entry)


def _wrong_form(path: Path | str, form: int) -> str:
    if form == 0:
        return (
            f"{path}: this file holds no ledger: a run that starts is there in a moment with it; where the run has "
            "trained already, it was emptied: restore it from a copy"
        )
    made_by = "a newer" if form > SCHEMA_VERSION else "an older"
    return f"{path}: {made_by} penstock wrote this ledger: it has form {form}, this one reads form {SCHEMA_VERSION}"


def _story(error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # there when SQLite itself refused; the rest is detail
    if code == sqlite3.SQLITE_FULL:
        return "the disk is full. Nothing of this transaction was written; free some space and resume the run"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return f"{error}. The file is damaged; restore it from a copy"
    return str(error)
