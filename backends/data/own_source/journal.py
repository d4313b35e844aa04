"""The rows that a user's source has made, with the state in which each draw has left it, in the folder of a run. Groups
that are pushed from outside have one of their own, whose source has no state.

Invariants:

* A row has its number for good when :meth:`Journal.commit` returns: it, and the state of the source after it, are on
  disk, and no row is ever made for that number again.
* The file of the state is the commit: it says how many rows, and how many bytes of them, count. What a process that
  died had written beyond is cut off by the next one, whose source makes it again from the state before.
* One process at a time: it holds a lock that the kernel takes back when it dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.durable import sync
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

FOLDER: Final = "data_source"
"""Of a run's folder."""
ROWS_FILE: Final = "rows.jsonl"
STATE_FILE: Final = "state.json"
LOCK_TIMEOUT_S: Final = 30.0
_LOCK_PAUSE_S: Final = 0.05


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source stands."""

    num_rows: int = 0
    """That it has made."""
    size_bytes: int = 0
    """Of these in the file of rows."""
    num_told: int = 0
    """Outcomes of the run's list that it has been told."""
    state: msgspec.Raw = msgspec.Raw(b"")
    """Of the class; empty: that of a new one."""


class JournalBusyError(RuntimeError):
    """Another process has the journal."""


class Journal:
    """See the module."""

    def __init__(self, run_folder: Path, folder: str = FOLDER) -> None:
        """``folder``: its name in that of the run.

        Raises:
            JournalBusyError: another process has it, and does not end.
            UserFault: it is damaged.
        """
        self._folder = run_folder / folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = (self._folder / ROWS_FILE).open("a+b")
        _lock(self._file, self._folder)
        self.standing = self._read_standing()
        self._starts = array("q")
        self._read_starts()

    def _read_standing(self) -> Standing:
        path = self._folder / STATE_FILE
        if not path.exists():
            return Standing()
        try:
            return msgspec.json.decode(path.read_bytes(), type=Standing)
        except UNREADABLE as error:
            raise UserFault(f"{path}: this file is damaged: {error}; begin a new run") from None

    def _read_starts(self) -> None:
        self._file.truncate(self.standing.size_bytes)
        self._file.seek(0)
        at = 0
        for line in self._file:
            self._starts.append(at)
            at += len(line)
        if len(self._starts) != self.standing.num_rows or at != self.standing.size_bytes:
            raise UserFault(
                f"{self._folder / ROWS_FILE}: expected {self.standing.num_rows} rows in "
                f"{self.standing.size_bytes} bytes, found {len(self._starts)} in {at}: the file is "
                "damaged; begin a new run"
            )

    def commit(self, rows: Sequence[bytes], state: bytes, *, num_told: int) -> None:
        """Take the next rows (JSON, each on one line), and the state that goes with them.

        Raises:
            OSError: the disk refuses.
        """
        at = self.standing.size_bytes
        self._file.seek(at)
        for row in rows:
            self._file.write(row + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        size_bytes = at + sum(len(row) + 1 for row in rows)
        standing = Standing(
            num_rows=self.standing.num_rows + len(rows),
            size_bytes=size_bytes,
            num_told=num_told,
            state=msgspec.Raw(state),
        )
        partial = self._folder / f"{STATE_FILE}.partial"
        partial.write_bytes(msgspec.json.encode(standing))
        sync(partial)
        partial.replace(self._folder / STATE_FILE)
        sync(self._folder)
        self.standing = standing
        for row in rows:
            self._starts.append(at)
            at += len(row) + 1

    def row(self, number: int) -> bytes:
        """A row that was taken, as JSON."""
        self._file.seek(self._starts[number])
        return self._file.readline()

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


def _lock(file: BinaryIO, folder: Path) -> None:
    """Of a predecessor that was killed the kernel takes the lock back when it has ended."""
    until_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise JournalBusyError(f"{folder}: another process has had this for {LOCK_TIMEOUT_S:g} s") from None
            time.sleep(_LOCK_PAUSE_S)
