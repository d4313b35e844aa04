"""Engines and a learner on the cores of one machine, which slow each other where they want more than there are.

A backend that works wants so many cores. As long as all that work want no more than there are, each runs at its own
speed; beyond that each has a core for the share ``f = cores ÷ wanted`` of the time, as a fair scheduler lets them, and
does the less in it the colder it finds the caches: it goes on at ``f ÷ (1 + cold_cost · (1 − f))`` of its speed. So
each has a *working time* that lags behind the clock of the host, and its model counts in it.

Invariants:

* Working time never goes back, and is never quicker than the clock.
* What was asked for after so many seconds comes after so many seconds of working time, in the order of falling due.
* An incarnation that was replaced wants nothing any more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Timers


class SharedCores:
    """The cores of one machine, and who works on them."""

    def __init__(self, num_cores: float) -> None:
        """
        Args:
            num_cores: above 0; that the machine has.
        """
        self._num_cores = num_cores
        self._members: dict[str, SharedTimers] = {}
        self._working: dict[SharedTimers, float] = {}
        """Cores that each one which works wants."""
        self.share = 1.0
        """Of the time, in which whoever works has a core."""

    def timers_of(self, name: str, timers: Timers, cores: float, cold_cost: float = 0.0) -> SharedTimers:
        """The clock of an actor's backend, in place of that of an earlier incarnation.

        Args:
            name: of the actor.
            timers: its clock without others beside it.
            cores: that it wants while it works, 0 or more.
            cold_cost: share by which its CPU time grows where it hardly has a core, 0 or more.
        """
        if name in self._members:
            self.work(self._members[name], 0.0)
        self._members[name] = made = SharedTimers(self, timers, cores, cold_cost)
        return made

    def work(self, member: SharedTimers, cores: float) -> None:
        """From now on this one wants so many cores; 0: none."""
        self._working.pop(member, None)
        if cores:
            self._working[member] = cores
        wanted = math.fsum(self._working.values())
        share = min(1.0, self._num_cores / wanted) if wanted else 1.0
        if share != self.share:
            for each in self._members.values():
                each.now_s()  # so far at the speed that it had
            self.share = share
            for each in self._members.values():
                each.arm()


class SharedTimers:
    """Working time as one backend sees it; implements :class:`penstock.backends.protocol.Timers`."""

    def __init__(self, shared: SharedCores, timers: Timers, cores: float, cold_cost: float) -> None:
        self._shared = shared
        self._timers = self.by_the_clock = timers
        self._cores = cores
        self._cold_cost = cold_cost
        self._works = False
        self._counted_s, self._worked_s = timers.now_s(), 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake_id = 0

    @property
    def _speed(self) -> float:
        share = self._shared.share
        return share / (1.0 + self._cold_cost * (1.0 - share))

    def work(self, is_at_work: bool) -> None:
        """Whether the backend computes anything from now on."""
        if is_at_work is not self._works:
            self._works = is_at_work
            self._shared.work(self, self._cores if is_at_work else 0.0)

    def now_s(self) -> float:
        """Working time."""
        now_s = self._timers.now_s()
        self._worked_s += max(0.0, now_s - self._counted_s) * self._speed
        self._counted_s = max(self._counted_s, now_s)
        return self._worked_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call after so much working time."""
        heapq.heappush(self._heap, (self.now_s() + delay_s, next(self._order), callback))
        if self._heap[0][2] is callback:
            self.arm()

    def arm(self) -> None:
        """Have the first callback come when it is due at the present speed, in place of what was armed before."""
        self._wake_id += 1
        if self._heap:
            wake_id, left_s = self._wake_id, max(0.0, self._heap[0][0] - self.now_s())
            self._timers.call_later(left_s / self._speed, lambda: self._wake(wake_id))

    def _wake(self, wake_id: int) -> None:
        if wake_id != self._wake_id:
            return  # the speed has changed, or something else comes first
        # What is armed for is due, whatever rounding makes of the time.
        due_s = max(self.now_s(), self._heap[0][0])
        while self._heap and self._heap[0][0] <= due_s:
            heapq.heappop(self._heap)[2]()
        self.arm()


def tell_work(timers: Timers) -> Callable[[bool], None]:
    """Whom a backend on this clock tells whether it works: nobody, where it has its cores for itself."""
    return timers.work if isinstance(timers, SharedTimers) else _nobody


def by_the_clock(timers: Timers) -> Timers:
    """The clock of the host, for what goes on elsewhere."""
    return timers.by_the_clock if isinstance(timers, SharedTimers) else timers


def _nobody(is_at_work: bool) -> None:
    """It has its cores for itself."""
