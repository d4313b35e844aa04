"""Virtual time: a heap of what happens when.

Invariants:

* Time never goes back, and stands still while something happens.
* What falls due together happens in the order in which it was asked for.
* Nothing here depends on the real clock or on hash seeds.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable


SOON_S: Final = 0.002
"""What falls due so soon is on its way between two processes, as most of what happens is."""
_Entry = tuple[float, int, "Callable[[Any, Any], None]", Any, Any]


class VirtualClock:
    """The clock, and everything that is still to happen."""

    __slots__ = ("_count", "_later", "_soon", "_stopped", "now_s", "num_steps")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_steps = 0
        """Entries of the heap that have happened."""
        self._soon: list[_Entry] = []
        self._later: list[_Entry] = []
        """Two heaps, whichever an entry lies in: the first stays small, however many processes wait for something."""
        self._count = 0
        self._stopped = False

    def at(self, at_s: float, act: Callable[[Any, Any], None], target: object, what: object) -> None:
        """``act(target, what)`` is to happen at this time, which is not past."""
        self._count += 1
        heap = self._soon if at_s < self.now_s + SOON_S else self._later
        heapq.heappush(heap, (at_s, self._count, act, target, what))

    def begin_at(self, now_s: float) -> None:
        """Stand at this time; what was asked for before it and has not happened, happens now."""
        self.now_s = now_s
        entries = (*self._soon, *self._later)
        self._later = [(max(now_s, at_s), count, act, target, what) for at_s, count, act, target, what in entries]
        self._soon = []
        heapq.heapify(self._later)

    def run(self, until_s: float) -> None:
        """Let everything happen up to this time, or until ``stop`` is called; the clock then stands there."""
        soon, later, pop, num_steps = self._soon, self._later, heapq.heappop, 0
        self._stopped = False
        try:
            while (soon or later) and not self._stopped:
                heap = soon if not later or (soon and soon[0] < later[0]) else later
                if heap[0][0] > until_s:
                    break
                at_s, _, act, target, what = pop(heap)
                self.now_s = at_s
                num_steps += 1
                act(target, what)
        finally:
            self.num_steps += num_steps
        if not self._stopped:
            self.now_s = max(self.now_s, until_s)

    def stop(self) -> None:
        """End ``run`` after what happens now."""
        self._stopped = True
