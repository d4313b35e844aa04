"""verl's rule of staleness as policies: it counts the samples under way, and bounds no sample's age.

With a threshold of s there may be ``(1 + s)`` batches between two publishes: what was under way when the last weights
came, and what was granted since. A batch is whatever is ready first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from penstock.actors.buffer.policies import BuiltinPolicy

if TYPE_CHECKING:
    from penstock.actors.buffer.policies import BufferState

UPDATES: Final = 16
"""Mini-batches between two publishes."""


class Threshold0(BuiltinPolicy, frozen=True, kw_only=True):
    """Nothing is granted before its weights are there."""

    THRESHOLD: ClassVar[float] = 0.0

    def target(self, state: BufferState) -> int:
        """``(1 + s)`` batches, less what was trained since the last publish."""
        batches = UPDATES * (1 + self.THRESHOLD) - (state.version - state.announced_version)
        return max(0, round(batches * state.groups_per_batch))


class Threshold10(Threshold0, frozen=True, kw_only=True):
    """0.1"""

    THRESHOLD: ClassVar[float] = 0.1


class Threshold30(Threshold0, frozen=True, kw_only=True):
    """0.3"""

    THRESHOLD: ClassVar[float] = 0.3


class Threshold50(Threshold0, frozen=True, kw_only=True):
    """0.5"""

    THRESHOLD: ClassVar[float] = 0.5
