"""One worker process as its pool sees it: what was sent, what came back, when it is overdue.

Invariants:

* A plain function works on one call at a time, the oldest that is unanswered; its time runs from the moment when
  the one before it was answered. Calls of an ``async`` function all run, each on its own time.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.processes.function_process import FunctionProcess
from penstock.backends.rewards.wire import SAID, Answer

if TYPE_CHECKING:
    from penstock.backends.rewards.wire import Call, Launched

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


class WorkerProcess(FunctionProcess[Answer]):
    """A process that calls one function."""

    def __init__(self, kind: str, spec: str, launched: Launched | None) -> None:
        service = None if launched is None else launched.function.remote or launched.function.judge
        key = None if service is None else service.auth_env
        told = "" if launched is None else msgspec.json.encode(launched).decode()
        super().__init__(MODULE, kind, spec, told, said=SAID, variables=() if key is None else (key,), name=spec)
        self._progress_s = self.started_at_s
        self._mean_s: float | None = None
        self.sent: deque[Sent] = deque()

    @property
    def room(self) -> int:
        """How many more calls it should be sent now."""
        if self.ready is None:
            return 0
        if self.is_side_by_side:
            return self.ready.concurrency - len(self.sent)
        depth = 1 if not self._mean_s else max(1, min(MAX_DEPTH, int(QUEUED_WORK_S / self._mean_s)))
        return depth - len(self.sent)

    def call(self, calls: list[Call]) -> None:
        """Send these."""
        now_s = time.monotonic()
        if not self.sent:
            self._progress_s = now_s
        self.sent.extend(Sent(call.id, call.timeout_s, now_s) for call in calls)
        self.send(calls)

    def answered(self, call_id: int, elapsed_s: float) -> None:
        """Strike a call off."""
        self._progress_s = time.monotonic()
        self._mean_s = elapsed_s if self._mean_s is None else 0.9 * self._mean_s + 0.1 * elapsed_s
        self.sent = deque(sent for sent in self.sent if sent.id != call_id)

    def deadlines(self) -> list[tuple[float, Sent]]:
        """When the calls that it works on are overdue."""
        if self.is_side_by_side:
            return [(sent.sent_at_s + sent.timeout_s + ASYNC_GRACE_S, sent) for sent in self.sent]
        return [(self._progress_s + self.sent[0].timeout_s, self.sent[0])] if self.sent else []

    @property
    def is_side_by_side(self) -> bool:
        """Whether its calls run side by side."""
        return self.ready is not None and self.ready.is_async
