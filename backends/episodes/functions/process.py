"""The process that plays episodes, as its engine's backend sees it: what goes in, what comes out, and its end.

Invariants:

* The process leads a session of its own: signals of the terminal do not reach it, and killing its group ends what
  the user's functions started as well.
* What it says that is no message of ours ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.episodes.functions.wire import SAID, frame
from penstock.backends.processes import how_it_ended
from penstock.backends.rewards.wire import FrameBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.episodes.functions.wire import Order, Said

READ_BYTES: Final = 1 << 16
REAP_TIMEOUT_S: Final = 5.0
MODULE: Final = "penstock.backends.episodes.functions.worker"


class PlayerProcess:
    """See the module."""

    def __init__(self, now_s: float) -> None:
        self.started_at_s = now_s
        self.is_loaded = False
        self.gone = ""
        """Why nothing more can come of it; empty while something can."""
        self._inbox = FrameBuffer()
        self._outbox = bytearray()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(),
            )

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._outbox)

    def send(self, order: Order) -> None:
        """Send this; whatever the socket does not take now follows with :meth:`flush`."""
        self._outbox += frame(order)
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # death shows on reading
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def receive(self) -> Iterator[Said]:
        """What it has said since; afterwards ``gone`` says whether more can come."""
        while not self.gone:
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.gone = "ended"
                return
            for body in self._inbox.feed(data):
                try:
                    yield SAID.decode(body)
                except msgspec.MsgspecError as error:
                    self.gone = f"said what nobody understands ({error})"
                    return

    def end(self) -> str:
        """Kill it with all that it started; returns in words how it ended. Again has no further effect."""
        if self._process.returncode is not None:
            return how_it_ended(self._process.returncode)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what has begun to exit keeps its own exit code
        self.socket.close()
        try:
            return how_it_ended(self._process.wait(REAP_TIMEOUT_S))
        except subprocess.TimeoutExpired:  # in the kernel, on a dead network file system say; it ends when it returns
            return f"(process {self._process.pid}) does not end"


def _environment() -> dict[str, str]:
    """Ours, with the places that Python looks in, and one thread for libraries that would take every core."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment.setdefault(name, "1")
    return environment
