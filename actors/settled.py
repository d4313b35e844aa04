"""What is settled, as far as one actor knows.

Invariants: it only grows; a state that is not newer changes nothing.
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
        self.sequence, self._floor, self._above = state.sequence, state.floor, frozenset(state.above)
        return True

    def newly(self, state: SettledState, groups: Collection[int]) -> list[int]:
        """Take over a newer state; which of these groups, none of which was settled before, are settled now."""
        floor, above = self._floor, self._above
        if not self.update(state):
            return []
        if self._floor - floor >= len(groups):  # a first state may pass millions
            return [group_id for group_id in groups if group_id in self]
        return [group_id for group_id in (*range(floor, self._floor), *(self._above - above)) if group_id in groups]
