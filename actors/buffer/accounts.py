"""The Buffer's accounts: what is settled, and what became of every sample.

Invariants:

* Everything below the floor is settled, the floor itself is not, and what is settled above it is listed.
* A sample ends once. ``issued`` grows when a group is granted and when a group closes with more samples than were
  granted (the replacements of failed ones), so it does not follow from the ends: a lost sample shows as an imbalance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.flow import SettledState
from penstock.messages.samples import SampleEnd, TerminalState
from penstock.messages.training import Balance, CauseCount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.ledger import SampleNote


class SettledGroups:
    """A floor and the exceptions above it."""

    def __init__(self) -> None:
        self._floor = 0
        self._above: set[int] = set()
        self._sequence = 0

    def __contains__(self, group_id: int) -> bool:
        return group_id < self._floor or group_id in self._above

    @property
    def floor(self) -> int:
        return self._floor

    def add(self, group_id: int) -> None:
        """Settle one group."""
        assert group_id not in self, f"group {group_id} is settled already"
        self._above.add(group_id)
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1
        self._sequence += 1

    def snapshot(self) -> SettledState:
        """As it is told to the keepers."""
        return SettledState(self._sequence, self._floor, tuple(sorted(self._above)))

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._floor not in self._above
        assert all(group_id > self._floor for group_id in self._above)


class Accounts:
    """Counts of issued and ended samples."""

    def __init__(self, samples_per_group: int) -> None:
        self._samples_per_group = samples_per_group
        self._issued = 0
        self._ended: dict[tuple[TerminalState, str], list[int]] = {}
        self.num_open_groups = 0

    def granted(self, num_groups: int) -> None:
        """Groups were granted."""
        self._issued += num_groups * self._samples_per_group
        self.num_open_groups += num_groups

    def trained(self, samples: Iterable[SampleNote], others: Iterable[SampleEnd]) -> None:
        """A group was trained: its samples, and those that had ended otherwise."""
        indices: list[int] = []
        for sample in samples:
            self._count(TerminalState.TRAINED, "", sample.num_tokens)
            indices.append(sample.index)
        self._close_with(others, indices)

    def closed(self, ended: Iterable[SampleEnd]) -> None:
        """A group ended otherwise."""
        self._close_with(ended, [])

    def balance(self) -> Balance:
        """Both sides as they stand."""
        ended = tuple(
            CauseCount(state=state.value, cause=cause, num_samples=counts[0], num_tokens=counts[1])
            for (state, cause), counts in sorted(self._ended.items())
        )
        return Balance(issued=self._issued, in_system=self.num_open_groups * self._samples_per_group, ended=ended)

    def _close_with(self, ended: Iterable[SampleEnd], indices: list[int]) -> None:
        for end in ended:
            self._count(end.state, end.cause, end.num_tokens)
            indices.append(end.key.index)
        self._issued += sum(1 for index in indices if index >= self._samples_per_group)
        self.num_open_groups -= 1

    def _count(self, state: TerminalState, cause: str, num_tokens: int) -> None:
        counts = self._ended.setdefault((state, cause), [0, 0])
        counts[0] += 1
        counts[1] += num_tokens
