"""The log of an incarnation: everything that its process prints, in at most two files.

Invariants:

* Descriptors 1 and 2 are the log, so what libraries and children print is in it.
* Once Python has printed ``MAX_BYTES`` there (a user's hook in the learner may print each token), the file becomes
  ``NAME.1``, in place of an older one, and a new one begins: what was printed last is always there.
* Printing never fails for a full disk: the actor must not end for its log.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

MAX_BYTES: Final = 64 << 20
DESCRIPTORS: Final = (1, 2)
"""Standard output and error."""


class _LogFile:
    """Where both streams lead."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = 0
        self._open()

    def _open(self) -> None:
        log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in DESCRIPTORS:
            os.dup2(log, descriptor)
        os.close(log)

    def write(self, descriptor: int, data: Buffer) -> int:
        """Write all of it, or leave out what the disk has no room for."""
        size = memoryview(data).nbytes
        try:
            if self._num_bytes >= MAX_BYTES:
                self._num_bytes = 0
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._open()
            os.write(descriptor, data)
        except OSError:
            return size
        self._num_bytes += size
        return size


class _Stream(io.RawIOBase):
    def __init__(self, log: _LogFile, descriptor: int) -> None:
        super().__init__()
        self._log = log
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        return self._log.write(self._descriptor, data)


def open_log(path: Path) -> None:
    """Lead standard output and error of this process into this file, behind what is there.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = _LogFile(path)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Stream(log, descriptor)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for descriptor in DESCRIPTORS
    )
