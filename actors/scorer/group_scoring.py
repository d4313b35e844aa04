"""Groups whose samples are scored together: which samples have come, and when all have.

A group of ``n`` has ``n`` places, as in :mod:`penstock.actors.filter.assembly`: place ``i`` is that of the sample of
index ``i`` and of its replacements ``i + n``, ``i + 2n``, …. Whether a failed sample is replaced is the Filter's to
decide, and the Filter says which places it has given up.

Invariants:

* A group is scored when each of its places has a sample, or is given up. So no function sees half a group.
* What comes after that (a replacement of a sample that failed later) is scored by itself: rewards that have been given
  stay as they are.
* A sample whose replacement is there is not scored any more: the Filter has written it off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.actors.waits import MAX_NAMED
from penstock.messages.samples import SampleKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.settled import KnownSettled


class HeldGroup(msgspec.Struct):
    """One group of which something has come."""

    group_id: int
    size: int
    refills: bool
    """A failed sample may be replaced."""
    here: dict[int, bool] = {}
    """Indices of samples that have come; True: it waits for its reward."""
    failed: set[int] = set()
    given_up: set[int] = set()
    """Places that stay empty."""
    asked: tuple[int, ...] = ()
    """Indices in the call that runs."""
    num_tries: int = 0
    sweep: int = 0
    """The sweep of the timer in which the backend was asked last."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """Indices without a reward."""
        return tuple(sorted(index for index, waits in self.here.items() if waits))

    def lacking(self) -> list[int]:
        """Indices that are still to come."""
        filled = {index % self.size for index in self.here} | self.given_up
        return [self._next(place) for place in range(self.size) if place not in filled]

    def _next(self, place: int) -> int:
        index = place
        while index in self.failed:
            index += self.size
        return index

    def superseded(self) -> list[int]:
        """Indices that wait for a reward although a replacement of theirs is known."""
        newest: dict[int, int] = {}
        for index in (*self.here, *self.failed):
            place = index % self.size
            newest[place] = max(index, newest.get(place, index))
        return [index for index in self.waiting if newest[index % self.size] > index]

    def fail(self, index: int) -> None:
        """This one has no reward and will have none."""
        self.here.pop(index, None)
        self.failed.add(index)
        if not self.refills:
            self.given_up.add(index % self.size)

    @property
    def is_due(self) -> bool:
        """Whether the function is to be asked now."""
        return not self.asked and any(self.here.values()) and not self.lacking()


class GroupScoring:
    """All groups that are held."""

    def __init__(self) -> None:
        self.groups: dict[int, HeldGroup] = {}
        self._given_up: dict[int, set[int]] = {}
        """Places that the Filter has given up, by group: word of them may come before the samples."""

    def of(self, group_id: int, size: int, *, refills: bool) -> HeldGroup:
        """The group, a new one where nothing had come."""
        group = self.groups.get(group_id)
        if group is None:
            given_up = set(self._given_up.get(group_id, ()))
            group = self.groups[group_id] = HeldGroup(group_id, size, refills, given_up=given_up)
        return group

    def give_up(self, places: Iterable[SampleKey]) -> list[HeldGroup]:
        """The Filter has given these up; the groups that know of it now."""
        touched: dict[int, HeldGroup] = {}
        for key in places:
            self._given_up.setdefault(key.group_id, set()).add(key.index)
            group = self.groups.get(key.group_id)
            if group is not None and key.index not in group.given_up:
                group.given_up.add(key.index)
                touched[key.group_id] = group
        return list(touched.values())

    def forget(self, settled: KnownSettled) -> None:
        """These groups are settled."""
        for group_id in [g for g in self.groups if g in settled]:
            del self.groups[group_id]
        for group_id in [g for g in self._given_up if g in settled]:
            del self._given_up[group_id]

    def lacking(self) -> list[tuple[object, int]]:
        """Samples that groups wait for, the first few of each, with how many have come."""
        return [
            (SampleKey(group.group_id, index), len(group.here))
            for group in self.groups.values()
            if any(group.here.values())
            for index in group.lacking()[:MAX_NAMED]
        ]

    def overdue(self, sweep: int) -> list[HeldGroup]:
        """Groups whose call was made before this sweep."""
        return [group for group in self.groups.values() if group.asked and group.sweep < sweep]

    def validate(self, unjudged: set[SampleKey], num_retries: int) -> None:
        """Assert the invariants. ``unjudged``: the samples that wait for a reward."""
        held = {SampleKey(g.group_id, index) for g in self.groups.values() for index in g.waiting}
        assert unjudged <= held, f"{unjudged - held} are held in no group"
        for group_id, group in self.groups.items():
            assert group_id == group.group_id
            assert not (group.here.keys() & group.failed)
            assert group.num_tries <= num_retries
            assert not group.is_due, f"group {group_id} is complete and not scored"
