"""Where a learner's time goes between one training and the next: training, other work, waiting."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class StepTimes:
    """Is told when there is something to do; a step lasts from the end of one training to the end of the next."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._step_began_s = self._work_began_s = self._idle_since_s = clock_s()
        self._wait_s = 0.0

    @contextmanager
    def at_work(self) -> Generator[None]:
        """While a command is carried out."""
        self._work_began_s = self._clock_s()
        self._wait_s += self._work_began_s - self._idle_since_s
        try:
            yield
        finally:
            self._idle_since_s = self._clock_s()

    def begin(self) -> None:
        """Open: the first step begins."""
        self._step_began_s, self._wait_s = self._clock_s(), 0.0

    def end(self) -> dict[str, float]:
        """``perf/…`` of the step that ends now with the work that is under way; the next one begins."""
        now_s = self._clock_s()
        step_time_s, wait_s, train_time_s = now_s - self._step_began_s, self._wait_s, now_s - self._work_began_s
        self.begin()
        return {
            "perf/train_time": train_time_s,
            "perf/train_wait_time": wait_s,
            "perf/step_time": step_time_s,
            "perf/wait_time_ratio": wait_s / step_time_s,
        }
