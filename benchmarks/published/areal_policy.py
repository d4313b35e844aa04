"""AReaL's rule of staleness as a policy: it bounds how many samples have been begun, and no sample's age.

With version i, ``(i + η + 1)`` batches may have been begun. A batch is whatever is ready, the oldest first, so a long
response is trained when it is there, however old it is then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.actors.buffer.policies import BuiltinPolicy

if TYPE_CHECKING:
    from penstock.actors.buffer.policies import BufferState

SLACK: Final = 8
"""``max_staleness`` is this much more than η: nothing gets as old, so that the bound of a sample's age is none."""


class Capacity(BuiltinPolicy, frozen=True, kw_only=True):
    """``(η + 1)`` batches that are under way or ready."""

    def target(self, state: BufferState) -> int:
        """Of groups."""
        return (self.max_staleness - SLACK + 1) * state.groups_per_batch
