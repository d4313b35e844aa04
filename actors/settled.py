"""What is settled, as far as one actor knows.

Invariants: it only grows; a state that is not newer changes nothing.

On the virtual host a thousand engines hear the very same state; so the last set that was made of one is remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.messages.flow import SettledState


class KnownSettled:
    """Everything below a floor, and some above it."""

    def __init__(self) -> None:
        self.sequence = 0
        self._floor = 0
        self._above: frozenset[int] = frozenset()

    def __contains__(self, group_id: int) -> bool:
        return group_id < self._floor or group_id in self._above

    def update(self, state: SettledState) -> bool:
        """Take over a newer state; False when this one is not newer."""
        if state.sequence <= self.sequence:
            return False
        self.sequence, self._floor, self._above = state.sequence, state.floor, _exceptions.of(state.above)
        return True

    def newly(self, state: SettledState, groups: Collection[int]) -> list[int]:
        """Take over a newer state; which of these groups, none of which was settled before, are settled now."""
        floor, above = self._floor, self._above
        if not self.update(state):
            return []
        if self._floor - floor + len(self._above) >= len(groups):  # a first state may pass millions
            return [group_id for group_id in groups if group_id in self]
        return [group_id for group_id in (*range(floor, self._floor), *(self._above - above)) if group_id in groups]


class _LastExceptions:
    """What lies above the floor as a set, made once for each state that is heard many times in one process."""

    def __init__(self) -> None:
        self._above: tuple[int, ...] = ()
        self._set: frozenset[int] = frozenset()

    def of(self, above: tuple[int, ...]) -> frozenset[int]:
        if above is not self._above:
            self._above, self._set = above, frozenset(above)
        return self._set


_exceptions = _LastExceptions()
