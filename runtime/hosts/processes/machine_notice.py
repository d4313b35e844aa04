"""Word that the machine of an engine will be taken: SIGTERM to its process, a file that appears there, or an HTTP
service that says so.

Invariants:

* Word is heard once, and counts from when it was heard.
* A second SIGTERM ends the process, as the first does where no notice is awaited.
* A file that was there before the process is word to a predecessor.

Nothing waits here: the loop is woken by the signal and by whoever asks the service, and looks for the file with every
report.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.runtime.hosts.processes.notice_service import NoticeService
from penstock.runtime.hosts.processes.wakeup import Wakeup

if TYPE_CHECKING:
    from types import FrameType


class Word(NamedTuple):
    """That the machine is taken."""

    left_s: float
    """Until then; 0 when it is past."""
    how: str


class MachineNotice:
    """Of one process. For the main thread, which alone handles signals."""

    def __init__(self, notice_s: float | None, file: str | None, url: str | None = None) -> None:
        """
        Args:
            notice_s: from word to the loss of the machine; None: there is no word.
            file: which says it, too.
            url: likewise; see :func:`.notice_service.is_taken`.
        """
        self._notice_s, self._file = notice_s, file
        self._began_unix_s = time.time()
        self._until_s: float | None = None
        self._how = ""
        self._signals: Wakeup[None] = Wakeup()
        self._service = None if url is None else NoticeService(url, lambda: self._signals.put(None))

    def fileno(self) -> int:
        """Readable when a signal has come, or the service has said so."""
        return self._signals.fileno()

    def listen(self) -> None:
        """From here on SIGTERM is word, where there is any, and the service is asked."""
        if self._notice_s is not None:
            signal.signal(signal.SIGTERM, self._heard)
        if self._service is not None:
            self._service.start()

    def take(self) -> bool:
        """Whether there was such news since the last call."""
        return bool(self._signals.take())

    def word(self) -> Word | None:
        """What was heard, by now."""
        if self._until_s is None and self._file is not None and self._has_appeared(self._file):
            self._begin(f"the file {self._file}", time.monotonic())
        if self._until_s is None and self._service is not None and self._service.heard_s is not None:
            self._begin(f"the notice service {self._service.url}", self._service.heard_s)
        if self._until_s is None:
            return None
        return Word(max(0.0, self._until_s - time.monotonic()), self._how)

    def close(self) -> None:
        """A signal ends the process from here on."""
        if self._notice_s is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._service is not None:
            self._service.close()
        self._signals.close()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._until_s is not None and self._how == "SIGTERM":
            raise SystemExit(128 + number)
        self._begin("SIGTERM", time.monotonic())
        self._signals.put(None)

    def _begin(self, how: str, heard_s: float) -> None:
        assert self._notice_s is not None, "a scenario's rules ask for the seconds"
        if self._until_s is None:
            self._until_s = heard_s + self._notice_s
        self._how = how

    def _has_appeared(self, path: str) -> bool:
        try:
            return os.stat(path).st_mtime >= self._began_unix_s
        except OSError:
            return False
