"""When a service that fails is left alone.

Invariants:

* After ``num_failures`` failures in a row nothing is sent for ``open_s``. Then one request is let through; an answer
  closes the breaker, a failure opens it anew.
* Whoever is kept waiting waits at most until its own deadline, and is told at once when that comes before the next
  request is let through.

| waits for | who ends it |
|---|---|
| the end of the pause | the clock |
| the one request that is let through | its answer, its failure, or its being given up; each wakes all |
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class BreakerOpenError(RuntimeError):
    """Nothing is sent to the service before this request's time is over."""


class Breaker:
    """Of one service; used on one event loop."""

    def __init__(self, num_failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._limit = num_failures
        self._open_s = open_s
        self._clock = clock
        self._num_failures = 0
        self._opened_at_s: float | None = None
        self._is_trying = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the service is left alone."""
        return self._opened_at_s is not None

    async def admit(self, deadline_s: float) -> None:
        """Return when a request may be sent; what becomes of it has to be said by one of the methods below.

        Raises:
            BreakerOpenError: not before the deadline.
        """
        while self._opened_at_s is not None:
            wait_s = self._opened_at_s + self._open_s - self._clock()
            if wait_s <= 0 and not self._is_trying:
                self._is_trying = True
                return
            left_s = deadline_s - self._clock()
            if left_s <= max(wait_s, 0.0):
                raise BreakerOpenError(
                    f"the service has failed {self._num_failures} times in a row and is left alone for a while"
                )
            changed = self._changed
            try:
                async with asyncio.timeout(left_s if wait_s <= 0 else wait_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def answered(self) -> None:
        """The service works."""
        self._num_failures, self._opened_at_s, self._is_trying = 0, None, False
        self._wake()

    def failed(self) -> None:
        """It does not."""
        self._num_failures += 1
        if self._is_trying or self._num_failures >= self._limit:
            self._opened_at_s, self._is_trying = self._clock(), False
            self._wake()

    def given_up(self) -> None:
        """Nothing is known: the request was ended from our side, or the service asked to be asked later."""
        self._is_trying = False
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
