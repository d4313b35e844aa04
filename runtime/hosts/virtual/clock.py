"""Virtual time: a heap of what happens when.

Invariants:

* Time never goes back, and stands still while something happens.
* What falls due together happens in the order in which it was asked for.
* Nothing here depends on the real clock or on hash seeds.
"""

from __future__ import annotations

import heapq
import math
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable


SOON_S: Final = 0.002
"""What falls due so soon is on its way between two processes, as most of what happens is."""
_Entry = tuple[float, int, "Callable[[Any, Any], None]", Any, Any]


def _end(*_: object) -> None:
    raise AssertionError("the end of time has come")


_LAST: Final[_Entry] = (math.inf, 0, _end, None, None)
"""Lies in each heap and never happens, so that neither is ever empty."""


class VirtualClock:
    """The clock, and everything that is still to happen."""

    __slots__ = ("_count", "_later", "_soon", "_stopped", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._soon: list[_Entry] = [_LAST]
        self._later: list[_Entry] = [_LAST]
        """Two heaps, whichever an entry lies in: the first stays small, however many processes wait for something."""
        self._count = 0
        self._stopped = False

    def at(self, at_s: float, act: Callable[[Any, Any], None], target: object, what: object) -> None:
        """``act(target, what)`` is to happen at this time, which is not past."""
        self._count += 1
        heap = self._soon if at_s < self.now_s + SOON_S else self._later
        heapq.heappush(heap, (at_s, self._count, act, target, what))

    @property
    def num_steps(self) -> int:
        """What was asked for and has happened."""
        return self._count + 2 - len(self._soon) - len(self._later)

    def begin_at(self, now_s: float) -> None:
        """Stand at this time; what was asked for before it and has not happened, happens now."""
        self.now_s = now_s
        entries = (entry for heap in (self._soon, self._later) for entry in heap if entry is not _LAST)
        begun = [(max(now_s, at_s), count, act, target, what) for at_s, count, act, target, what in entries]
        self._soon, self._later = [_LAST], [_LAST, *begun]
        heapq.heapify(self._later)

    def run(self, until_s: float) -> None:
        """Let everything happen up to this time, or until ``stop`` is called; the clock then stands there."""
        soon, later, pop = self._soon, self._later, heapq.heappop
        end_s = min(until_s, sys.float_info.max)
        self._stopped = False
        while not self._stopped:
            heap = soon if soon[0] < later[0] else later
            if heap[0][0] > end_s:
                break
            self.now_s, _, act, target, what = pop(heap)
            act(target, what)
        if not self._stopped:
            self.now_s = max(self.now_s, until_s)

    def stop(self) -> None:
        """End ``run`` after what happens now."""
        self._stopped = True
