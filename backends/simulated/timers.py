"""The clock that simulated backends run on.

A simulated backend owns no thread. It asks for a callback after so many seconds: of the virtual clock on the virtual
host, of a :class:`ThreadTimers` on a real one.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ThreadTimers:
    """Real time: one daemon thread that calls everything back.

    A callback that raises ends the thread; ``fail`` then hears of it, so that nothing waits for what never comes.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="simulated-timers", daemon=True)
        self._thread.start()

    def now_s(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call on the timer thread after the delay; from any thread. Ignored after ``close``."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (self.now_s() + delay_s, next(self._count), callback))
            if self._heap[0][2] is callback:
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Call nothing more, and end the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while callbacks := self._due():
                for callback in callbacks:
                    callback()
        except BaseException as error:  # the thread's end is handed on, never swallowed
            self._fail(error)

    def _due(self) -> list[Callable[[], None]]:
        """What is to be called now, in order; nothing once it is closed."""
        heap = self._heap
        due: list[Callable[[], None]] = []
        with self._changed:
            while not self._closed and not due:
                now_s = self.now_s()
                while heap and heap[0][0] <= now_s:
                    due.append(heapq.heappop(heap)[2])
                if not due:
                    self._changed.wait(heap[0][0] - now_s if heap else None)
        return due
