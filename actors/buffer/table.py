"""The Buffer's table of outstanding groups, with the counts by deadline that selection needs.

Invariants: every count equals what counting the groups gives; a record is there for READY and LEASED groups only.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.buffer.policies import RankedGroup
from penstock.actors.transitions import Steps
from penstock.messages.flow import GroupRow
from penstock.messages.ledger import BatchLeased, GroupClosed, GroupRecorded, GroupsGranted, StepRecorded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.actors.transitions import Transitions

NEVER_OLD: Final = 1 << 62


class Status(Enum):
    """How far an outstanding group has come."""

    GRANTED = "granted"
    READY = "ready"
    """It has come in."""
    LEASED = "leased"
    """It is in the batch that is out."""


GROUP: Final[Transitions] = {
    (None, GroupsGranted): (Status.GRANTED,),
    (Status.GRANTED, GroupRecorded): (Status.READY,),
    (Status.GRANTED, GroupClosed): (None,),
    (Status.READY, BatchLeased): (Status.LEASED,),
    (Status.READY, GroupClosed): (None,),
    (Status.LEASED, StepRecorded): (None,),
}


class TrackedGroup(msgspec.Struct):
    """One outstanding group."""

    group_id: int
    ordinal: int
    min_version: int
    deadline: int
    max_staleness: int
    """η of the policy that it was granted under."""
    status: Status = Status.GRANTED
    record: GroupRecorded | None = None
    row: GroupRow | None = None
    """Where rows are chosen, and this one is recorded."""


class GroupTable:
    """All outstanding groups by id."""

    def __init__(self) -> None:
        self._groups: dict[int, TrackedGroup] = {}
        self._ready: dict[int, RankedGroup] = {}
        self._unleased: Counter[int] = Counter()
        self._ready_deadlines: Counter[int] = Counter()
        self._num_leased = 0
        self.steps = Steps(GROUP)

    # --- moves ------------------------------------------------------------------------------------------------

    def grant(self, tracked: TrackedGroup) -> None:
        """A group enters."""
        self._groups[tracked.group_id] = tracked
        self.steps.take(None, tracked.status)
        self._unleased[tracked.deadline] += 1

    def admit(self, record: GroupRecorded) -> None:
        """GRANTED → READY, with a deadline that is no earlier than the granted one."""
        tracked, deadline = self._groups[record.group_id], record.deadline_version
        assert tracked.status is Status.GRANTED
        assert deadline >= tracked.deadline
        _decrement(self._unleased, tracked.deadline)
        self._unleased[deadline] += 1
        self._ready_deadlines[deadline] += 1
        self._turn(tracked, Status.READY)
        tracked.record, tracked.deadline = record, deadline
        num_tokens = sum(note.num_tokens for note in record.samples)
        self._ready[record.group_id] = RankedGroup(
            group_id=record.group_id, deadline_version=deadline, num_tokens=num_tokens
        )

    def lease(self, group_ids: Sequence[int]) -> None:
        """READY → LEASED."""
        for group_id in group_ids:
            tracked = self._groups[group_id]
            assert tracked.status is Status.READY
            self._leave(tracked)
            self._turn(tracked, Status.LEASED)
            self._num_leased += 1

    def remove(self, group_id: int) -> TrackedGroup:
        """A group leaves, from whatever status."""
        tracked = self._groups.pop(group_id)
        self.steps.take(tracked.status, None)
        if tracked.status is Status.LEASED:
            self._num_leased -= 1
        else:
            self._leave(tracked)
        return tracked

    def _turn(self, tracked: TrackedGroup, status: Status) -> None:
        self.steps.take(tracked.status, status)
        tracked.status = status

    def _leave(self, tracked: TrackedGroup) -> None:
        _decrement(self._unleased, tracked.deadline)
        if tracked.status is Status.READY:
            _decrement(self._ready_deadlines, tracked.deadline)
            del self._ready[tracked.group_id]

    # --- looks ------------------------------------------------------------------------------------------------

    def records(self) -> list[GroupRecorded]:
        """Of the groups that have come."""
        return [tracked.record for tracked in self._groups.values() if tracked.record is not None]

    def get(self, group_id: int) -> TrackedGroup | None:
        return self._groups.get(group_id)

    def tracked(self, group_id: int) -> TrackedGroup:
        return self._groups[group_id]

    def outstanding(self) -> Iterator[TrackedGroup]:
        """Every outstanding group, in the order of their issue."""
        return iter(self._groups.values())

    def ready_groups(self) -> list[RankedGroup]:
        return list(self._ready.values())

    def ready_ids(self) -> tuple[int, ...]:
        """In the order in which they came."""
        return tuple(self._ready)

    @property
    def num_outstanding(self) -> int:
        return len(self._groups)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_leased(self) -> int:
        return self._num_leased

    @property
    def num_unleased(self) -> int:
        return len(self._groups) - self._num_leased

    @property
    def num_in_generation(self) -> int:
        """Granted and not admitted."""
        return len(self._groups) - self._num_leased - len(self._ready)

    @property
    def unleased_by_deadline(self) -> Mapping[int, int]:
        return self._unleased

    @property
    def ready_by_deadline(self) -> Mapping[int, int]:
        return self._ready_deadlines

    def past_deadline(self, version: int) -> list[TrackedGroup]:
        """Groups in no batch whose deadline is before ``version``."""
        if not any(deadline < version for deadline in self._unleased):
            return []
        return [t for t in self._groups.values() if t.status is not Status.LEASED and t.deadline < version]

    def fully_older(self, version: int, max_staleness: int) -> list[TrackedGroup]:
        """Ready groups of which every token is older at ``version`` than this bound, or than that of their grant."""
        found: list[TrackedGroup] = []
        for group_id in self._ready:
            tracked = self._groups[group_id]
            if _newest_version(tracked.record) < version - min(max_staleness, tracked.max_staleness):
                found.append(tracked)
        return found

    def last_to_keep(self, deadline: int) -> list[TrackedGroup]:
        """Groups in no batch with this deadline or an earlier one, those to be given up first in front: what is not
        ready before what is, the later issued before the earlier."""
        found = [t for t in self._groups.values() if t.status is not Status.LEASED and t.deadline <= deadline]
        return sorted(found, key=lambda t: (t.status is Status.READY, -t.group_id))

    def validate(self) -> None:
        """Assert the invariants."""
        self.steps.validate()
        unleased = Counter(t.deadline for t in self._groups.values() if t.status is not Status.LEASED)
        ready = Counter(t.deadline for t in self._groups.values() if t.status is Status.READY)
        assert unleased == self._unleased, (unleased, self._unleased)
        assert ready == self._ready_deadlines, (ready, self._ready_deadlines)
        assert self._num_leased == sum(1 for t in self._groups.values() if t.status is Status.LEASED)
        assert set(self._ready) == {t.group_id for t in self._groups.values() if t.status is Status.READY}
        assert all((t.record is None) == (t.status is Status.GRANTED) for t in self._groups.values())


def _decrement(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _newest_version(record: GroupRecorded | None) -> int:
    """A group without tokens is never too old."""
    assert record is not None
    return max((n.newest_version for n in record.samples if n.newest_version is not None), default=NEVER_OLD)
