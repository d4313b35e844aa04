"""What is settled, as far as one actor knows.

Invariants: it only grows; a state that is not newer changes nothing. Groups of training and those of evaluations have a
floor each, and exceptions above it.

On the virtual host a thousand engines hear the very same state; so the last set that was made of one is remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.samples import evaluation_group_id

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.messages.flow import SettledState


class KnownSettled:
    """Everything below two floors, and some above them."""

    __slots__ = ("_above", "_evaluation_floor", "_floor", "sequence")

    def __init__(self, state: SettledState | None = None) -> None:
        self.sequence = 0
        self._floor = self._evaluation_floor = 0
        self._above: frozenset[int] = frozenset()
        if state is not None:
            self.update(state)

    def __contains__(self, group_id: int) -> bool:
        if group_id < 0:  # of an evaluation; spelt out, as this is asked of every event
            return ~group_id < self._evaluation_floor or group_id in self._above
        return group_id < self._floor or group_id in self._above

    def update(self, state: SettledState) -> bool:
        """Take over a newer state; False when this one is not newer."""
        if state.sequence <= self.sequence:
            return False
        self.sequence, self._floor, self._evaluation_floor = state.sequence, state.floor, state.evaluation_floor
        last = _last_exceptions
        if state.above is not last.above:
            last.above, last.as_set = state.above, frozenset(state.above)
        self._above = last.as_set
        return True

    def newly(self, state: SettledState, groups: Collection[int], others: Collection[int] = ()) -> Collection[int]:
        """Take over a newer state; which of these groups, none of which was settled before, are settled now. Those that
        stand in both collections are named once."""
        floor, evaluation_floor, above = self._floor, self._evaluation_floor, self._above
        if not self.update(state) or not (groups or others):
            return ()
        num_below = self._floor - floor + self._evaluation_floor - evaluation_floor
        if num_below + len(self._above) >= len(groups) + len(others):  # a first state may pass millions
            return self._settled_among(groups, others)
        evaluated = map(evaluation_group_id, range(evaluation_floor, self._evaluation_floor))
        news = (*range(floor, self._floor), *evaluated, *(self._above - above))
        return [group_id for group_id in news if group_id in groups or group_id in others]

    def _settled_among(self, *collections: Collection[int]) -> Collection[int]:
        floor, evaluation_floor, above = self._floor, self._evaluation_floor, self._above
        return {  # as __contains__ has it
            group_id: None
            for held in collections
            if held and (min(held) < floor or not above.isdisjoint(held))  # most keep nothing of it
            for group_id in held
            if group_id in above or (group_id < floor if group_id >= 0 else ~group_id < evaluation_floor)
        }


class _LastExceptions:
    """What lies above the floors as a set, made once for each state that is heard many times in one process."""

    __slots__ = ("above", "as_set")

    def __init__(self) -> None:
        self.above: tuple[int, ...] = ()
        self.as_set: frozenset[int] = frozenset()


_last_exceptions = _LastExceptions()
