"""Signals as something that a poller can wait for.

A Python handler alone does not wake ``zmq.poll``: it may run only when the poll has timed out. The interpreter's
wake-up descriptor is written in the C handler, so no signal is missed and none is late.
"""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Self

HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Catches SIGINT, SIGTERM and SIGHUP: within a ``with`` block, or from ``install`` on. For the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def install(self) -> None:
        """From here on, signals go to the descriptor."""
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _ignore) for number in HANDLED}

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """Those that have come since the last call."""
        try:
            data = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in data if number in HANDLED]


def _ignore(number: int, frame: FrameType | None) -> None:
    """The descriptor has told the poller."""
