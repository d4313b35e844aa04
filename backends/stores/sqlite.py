"""A ledger in one SQLite file: WAL, synced on every commit.

Invariants:

* The epoch is checked in the transaction that writes, so a stale writer cannot slip in between.
* An entry's body is its msgpack form with its tag; ``kind`` repeats the tag for people with a ``sqlite3`` prompt.
* The file is on a local disk: WAL needs shared memory between its users, which network file systems do not give.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.stores.protocol import LedgerStoreError, StaleEpochError
from penstock.messages.ledger import LedgerEntry

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

BUSY_TIMEOUT_S: Final = 10.0
SCHEMA_VERSION: Final = 1

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS entries (
    sequence INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS claim (only INTEGER PRIMARY KEY CHECK (only = 0), epoch INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO claim VALUES (0, -1);
"""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[LedgerEntry]] = msgspec.msgpack.Decoder(LedgerEntry)


class SqliteStore:
    """A handle on the ledger in ``path``, which is made if it is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._epoch: int | None = None
        with self._named("opened"):
            # Autocommit mode: every transaction in here is begun and ended by hand.
            self._database = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        try:
            with self._named("opened"):
                self._prepare()
        except LedgerStoreError:
            self._database.close()
            raise

    def claim(self, epoch: int) -> None:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        with self._named("claimed"), self._transaction():
            if (claimed := self._claimed()) >= epoch:
                raise StaleEpochError(
                    f"{self._path}: claimed with epoch {claimed}; epoch {epoch} is not above it. Another process "
                    "drives this run, or has driven it since"
                )
            self._database.execute("UPDATE claim SET epoch = ?", (epoch,))
        self._epoch = epoch

    def commit(self, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        if self._epoch is None:
            raise StaleEpochError(f"{self._path}: the ledger was not claimed by this handle")
        rows = [(self._epoch, type(entry).__name__, _ENCODER.encode(entry)) for entry in entries]
        with self._named("written"), self._transaction():
            if (claimed := self._claimed()) != self._epoch:
                raise StaleEpochError(f"{self._path}: claimed with epoch {claimed}; this is epoch {self._epoch}")
            self._database.executemany("INSERT INTO entries (epoch, kind, body) VALUES (?, ?, ?)", rows)

    def entries(self) -> Iterator[LedgerEntry]:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        with self._named("read"):
            rows = self._database.execute("SELECT sequence, kind, body FROM entries ORDER BY sequence")
            for sequence, kind, body in rows:
                try:
                    yield _DECODER.decode(body)
                except msgspec.MsgspecError as error:
                    raise LedgerStoreError(
                        f"{self._path}: entry {sequence} ({kind}) cannot be read: {error}. The file is damaged, or a "
                        "newer penstock wrote it"
                    ) from error

    def close(self) -> None:
        """Let go of the file."""
        self._epoch = None
        self._database.close()

    def _prepare(self) -> None:
        (mode,) = self._database.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise LedgerStoreError(
                f"{self._path}: SQLite cannot use a write-ahead log here (it stays in mode {mode}). Put the run's "
                "folder on a local disk (run.folder)"
            )
        self._database.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise LedgerStoreError(
                    f"{self._path}: the ledger has form {version}, and this penstock reads form {SCHEMA_VERSION}"
                )
            for statement in _SCHEMA.split(";"):
                self._database.execute(statement)
            self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _claimed(self) -> int:
        (epoch,) = self._database.execute("SELECT epoch FROM claim").fetchone()
        return int(epoch)

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._database.execute("BEGIN IMMEDIATE")
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
            raise LedgerStoreError(f"{self._path}: the ledger cannot be {action}: {error}") from error
