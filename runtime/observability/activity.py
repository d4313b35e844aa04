"""Time accounting: each engine and learner is at every moment in exactly one state.

Invariants:

* The spans that a clock gives away follow one another without gap or overlap, from the clock's start to the last
  ``take``. Their lengths add up to that time.
* ``occupancy`` of a working span is the mean over its time of running ÷ capacity; of any other span it is 1 and means
  nothing. ``outside`` is the mean share of slots whose episodes wait for tools, in any state.
* ``LaneTiler`` makes the same true over all incarnations of an actor: time of which nothing was heard is ``down``, and
  ``absent`` where the actor was not in the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.training import Activity, ActivitySpan

if TYPE_CHECKING:
    from collections.abc import Iterable


class ActivityClock:
    """The states of one incarnation of an actor. Not for several threads at once."""

    __slots__ = (
        "_activity", "_area_s", "_closed", "_last_s", "_occupancy", "_outside", "_outside_area_s", "_start_s"
    )  # fmt: skip

    def __init__(self, now_s: float, activity: Activity = Activity.STARTING) -> None:
        """
        Args:
            now_s: seconds since the start of the run, as every later time.
            activity: the state from now on.
        """
        self._activity = activity
        self._start_s = now_s
        self._last_s = now_s
        self._occupancy = 1.0
        self._area_s = 0.0
        """Integral of the occupancy over the open span, up to ``_last_s``."""
        self._outside = self._outside_area_s = 0.0
        """Likewise."""
        self._closed: list[ActivitySpan] = []

    @property
    def activity(self) -> Activity:
        """The present state."""
        return self._activity

    def switch(self, activity: Activity, now_s: float, occupancy: float = 1.0, outside: float = 0.0) -> None:
        """From now on the state is this one; switching to the present state only changes the occupancy.

        Args:
            activity: the new state.
            now_s: not before the time of any earlier call.
            occupancy: running ÷ capacity from now on, in [0, 1]; counts while working.
            outside: waiting for tools ÷ capacity from now on, in [0, 1].
        """
        self._advance(now_s)
        if activity is not self._activity:
            self._close(now_s)
            self._activity = activity
        self._occupancy, self._outside = occupancy, outside

    def take(self, now_s: float) -> tuple[ActivitySpan, ...]:
        """The spans since the last call, the open one cut at now."""
        self._advance(now_s)
        self._close(now_s)
        taken, self._closed = tuple(self._closed), []
        return taken

    def _advance(self, now_s: float) -> None:
        assert now_s >= self._last_s, f"time went back from {self._last_s} to {now_s}"
        self._area_s += (now_s - self._last_s) * self._occupancy
        self._outside_area_s += (now_s - self._last_s) * self._outside
        self._last_s = now_s

    def _close(self, now_s: float) -> None:
        length_s = now_s - self._start_s
        if length_s > 0:
            is_working = self._activity is Activity.WORKING
            occupancy = min(1.0, self._area_s / length_s) if is_working else 1.0
            outside = min(1.0, self._outside_area_s / length_s)
            self._closed.append(ActivitySpan(self._activity, self._start_s, now_s, occupancy, outside))
        self._start_s = now_s
        self._area_s = self._outside_area_s = 0.0


class LaneTiler:
    """Joins the spans of successive incarnations of one actor into one lane that begins at 0."""

    def __init__(self, before: ActivitySpan | None = None) -> None:
        """
        Args:
            before: the last span of an earlier drive of the run; until the actor is heard of, it is down.
        """
        self.end_s = 0.0 if before is None else before.end_s
        """Up to where the lane is tiled."""
        self._last = before
        self._is_lost = before is not None
        self._gap = Activity.STARTING if before is None else Activity.DOWN
        """What time is of which nothing was heard."""
        if before is not None and before.activity is Activity.ABSENT:
            self._gap = Activity.ABSENT

    def add(self, spans: Iterable[ActivitySpan]) -> list[ActivitySpan]:
        """What these spans, in order, add to the lane: a gap before one is filled (``starting`` before the first,
        ``down`` later: nothing was heard), and what the lane has already is cut off."""
        tiles: list[ActivitySpan] = []
        for span in spans:
            if span.end_s <= self.end_s:
                continue
            start_s = max(span.start_s, self.end_s)
            tiles.extend(self._fill(start_s))
            tiles.append(ActivitySpan(span.activity, start_s, span.end_s, span.occupancy, span.outside))
            self.end_s = span.end_s
            self._last, self._gap = span, Activity.DOWN
            self._is_lost = False
        return tiles

    def joins(self, now_s: float) -> list[ActivitySpan]:
        """The actor comes into the run, where it was not before."""
        self._gap = Activity.ABSENT
        tiles = self._fill(now_s)
        self._gap = Activity.STARTING
        return tiles

    def leaves(self, now_s: float) -> list[ActivitySpan]:
        """The actor goes out of the run."""
        tiles = self.close(now_s)
        self._is_lost, self._gap = True, Activity.ABSENT
        return tiles

    def lost(self) -> None:
        """The incarnation was given up: until another one is heard of, the lane is down."""
        self._is_lost = True

    def close(self, end_s: float) -> list[ActivitySpan]:
        """What is missing up to the end of the run: a lane that was not lost stayed in its last state since it reported
        last, which is one heartbeat at most."""
        last = self._last
        if last is None or self._is_lost or end_s <= self.end_s:
            return self._fill(end_s)
        tile = ActivitySpan(last.activity, self.end_s, end_s, last.occupancy, last.outside)
        self.end_s = end_s
        return [tile]

    def _fill(self, until_s: float) -> list[ActivitySpan]:
        if until_s <= self.end_s:
            return []
        tile = ActivitySpan(self._gap, self.end_s, until_s)
        self.end_s = until_s
        return [tile]
