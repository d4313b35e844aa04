"""What a process with a user's functions prints, passed on to our own log up to bounds.

Invariants:

* Between two messages of the process (so of a call, where they run in turn) at most ``STRETCH_BYTES`` are passed on,
  and of all such processes that this one has started at most ``TOTAL_BYTES``. What was left out is said in one line.
* The pipe is always read: printing never blocks the function, whatever becomes of our log.
* What has been read is passed on in whole lines, so that the lines of two streams do not run into each other where
  Python writes a line and its end apart (``PYTHONUNBUFFERED``). A line's beginning waits for its end, for
  ``READ_BYTES`` of it or for the end of the process.

| wait | who ends it |
|---|---|
| for what is printed | the process's end, which closes the pipe |
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

READ_BYTES: Final = 1 << 16
STRETCH_BYTES: Final = 1 << 14
TOTAL_BYTES: Final = 1 << 24
STREAMS: Final = (1, 2)
"""Our standard output and error, which are the log of an actor."""
_SPENT: Final = [0]
_LOCK: Final = threading.Lock()


class PassedOutput:
    """One stream of one process, which is given ``descriptor`` for it."""

    def __init__(self, name: str, log: int) -> None:
        """
        Args:
            name: of the process, for the line that says what was left out.
            log: descriptor that it is passed on to.
        """
        self._name = name
        self._log = log
        self._passed = self._left_out = 0
        self._is_new_stretch = False
        self._begun_line = b""
        self._reads, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._pass_on, name="user-output", daemon=True)
        self._thread.start()

    def next_stretch(self) -> None:
        """The process has said something: it may print as much again."""
        self._is_new_stretch = True

    def close(self, timeout_s: float) -> None:
        """Wait until all is read that was printed by a process which has ended."""
        self._thread.join(timeout_s)

    def _pass_on(self) -> None:
        with contextlib.closing(os.fdopen(self._reads, "rb", buffering=0)) as pipe:
            while data := pipe.read(READ_BYTES):
                text = self._begun_line + data
                num_ended = len(text) if len(text) >= READ_BYTES else text.rfind(b"\n") + 1
                self._begun_line = text[num_ended:]
                self._pass(text[:num_ended])
        self._pass(self._begun_line)
        self._tell()

    def _pass(self, data: bytes) -> None:
        if self._is_new_stretch:
            self._is_new_stretch = False
            self._tell()
            self._passed = 0
        room = max(0, STRETCH_BYTES - self._passed)
        self._passed += len(data[:room])
        self._left_out += len(data) - _write(self._log, data[:room], TOTAL_BYTES)

    def _tell(self) -> None:
        if self._left_out:
            line = (
                f"\n[{self._left_out:,} more bytes that {self._name} printed are left out: {STRETCH_BYTES:,} of a call "
                f"and {TOTAL_BYTES:,} of a log are kept]\n"
            )
            _write(self._log, line.encode(errors="replace"), TOTAL_BYTES + READ_BYTES)
        self._left_out = 0


def passed_outputs(name: str) -> tuple[PassedOutput, ...]:
    """Standard output and standard error of a process of this name."""
    return tuple(PassedOutput(name, log) for log in STREAMS)


def _write(log: int, data: bytes, total_bytes: int) -> int:
    """Write as much as there is room for in the log; how much that was."""
    with _LOCK:
        data = data[: max(0, total_bytes - _SPENT[0])]
        _SPENT[0] += len(data)
        with contextlib.suppress(OSError):  # a full disk, above all
            os.write(log, data)
        return len(data)
