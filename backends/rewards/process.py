"""One worker process as its pool sees it: what was sent, what came back, when it is overdue.

Invariants:

* The process leads a session of its own: signals of the terminal do not reach it, and killing its group ends what
  the user's function started as well.
* A plain function works on one call at a time, the oldest that is unanswered; its time runs from the moment when
  the one before it was answered. Calls of an ``async`` function all run, each on its own time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.rewards.wire import SAID, FrameBuffer, Ready, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.rewards.wire import Call, Said

READ_BYTES: Final = 1 << 16
REAP_TIMEOUT_S: Final = 5.0
ASYNC_GRACE_S: Final = 1.0
"""An ``async`` call ends itself at its deadline; one that has not by then blocks the others too."""
QUEUED_WORK_S: Final = 0.005
MAX_DEPTH: Final = 64
"""Quick calls are sent ahead, as many as take so long together, so that the pipe is never waited for."""
MODULE: Final = "penstock.backends.rewards.worker"


class Sent(NamedTuple):
    """A call that was sent and is not answered."""

    id: int
    timeout_s: float
    sent_at_s: float


class WorkerProcess:
    """A process that calls one function."""

    def __init__(self, kind: str, spec: str, options_json: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inbox = FrameBuffer()
        self._outbox = bytearray()
        self._progress_s = self.started_at_s = clock()
        self._mean_s: float | None = None
        self.ready: Ready | None = None
        self.is_gone = False
        self.sent: deque[Sent] = deque()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), kind, spec, str(os.getpid()), options_json],
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
    def room(self) -> int:
        """How many more calls it should be sent now."""
        if self.ready is None:
            return 0
        if self.is_side_by_side:
            return self.ready.concurrency - len(self.sent)
        depth = 1 if not self._mean_s else max(1, min(MAX_DEPTH, int(QUEUED_WORK_S / self._mean_s)))
        return depth - len(self.sent)

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._outbox)

    def send(self, calls: list[Call]) -> None:
        """Send these; whatever the socket does not take now follows with :meth:`flush`."""
        now_s = self._clock()
        if not self.sent:
            self._progress_s = now_s
        self.sent.extend(Sent(call.id, call.timeout_s, now_s) for call in calls)
        self._outbox += frame(calls)
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # death shows on reading
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def receive(self) -> Iterator[Said]:
        """What it has said since; afterwards ``is_gone`` says whether it has closed its end."""
        while True:
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.is_gone = True
                return
            for body in self._inbox.feed(data):
                yield from SAID.decode(body)

    def answered(self, call_id: int, elapsed_s: float) -> None:
        """Strike a call off."""
        self._progress_s = self._clock()
        self._mean_s = elapsed_s if self._mean_s is None else 0.9 * self._mean_s + 0.1 * elapsed_s
        self.sent = deque(sent for sent in self.sent if sent.id != call_id)

    def deadline_s(self) -> float | None:
        """When this process is overdue; None while it has nothing to do."""
        if not self.sent:
            return None
        if self.is_side_by_side:
            return min(sent.sent_at_s + sent.timeout_s for sent in self.sent) + ASYNC_GRACE_S
        return self._progress_s + self.sent[0].timeout_s

    def overdue(self) -> set[int]:
        """The calls whose time is up."""
        now_s = self._clock()
        if self.is_side_by_side:
            return {sent.id for sent in self.sent if sent.sent_at_s + sent.timeout_s + ASYNC_GRACE_S <= now_s}
        if self.sent and self._progress_s + self.sent[0].timeout_s <= now_s:
            return {self.sent[0].id}
        return set()

    @property
    def is_side_by_side(self) -> bool:
        """Whether its calls run side by side."""
        return self.ready is not None and self.ready.is_async

    def end(self) -> str:
        """Kill it with all that it started; returns in words how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what has begun to exit keeps its own exit code
        self.socket.close()
        try:
            code = self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # in the kernel, on a dead network file system say; it ends when it returns
            return f"process {self._process.pid} does not end"
        if code >= 0:
            return f"exited with code {code}"
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"


def _environment() -> dict[str, str]:
    """Ours, with the places that Python looks in, and one thread for libraries that would take every core."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment.setdefault(name, "1")
    return environment
