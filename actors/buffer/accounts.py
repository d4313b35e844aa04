"""The Buffer's accounts: what is settled, and what became of every sample.

Invariants:

* Everything below the floor is settled, the floor itself is not, and what is settled above it is listed.
* Groups of training and those of evaluations are settled apart, each kind above a floor of its own.
* A sample ends once. ``issued`` grows when a group is granted, when a group closes with more samples than were granted
  (the replacements of failed ones), and when an evaluation is opened, so it does not follow from the ends: a lost
  sample shows as an imbalance.
* Tokens of responses are counted as they come, with their group, and leave what is in the system with it, so what was
  generated does not follow from the ends either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.flow import SettledState
from penstock.messages.samples import (
    SampleEnd,
    TerminalState,
    evaluation_group_id,
    evaluation_place,
    is_evaluation,
)
from penstock.messages.training import Balance, CauseCount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.evaluation import EvaluatedSample
    from penstock.messages.ledger import GroupRecorded


class SettledGroups:
    """Of training and of evaluations."""

    def __init__(self) -> None:
        self._trained = SettledPlaces()
        self._evaluated = SettledPlaces()

    def __contains__(self, group_id: int) -> bool:
        if is_evaluation(group_id):
            return evaluation_place(group_id) in self._evaluated
        return group_id in self._trained

    @property
    def floor(self) -> int:
        """Of training."""
        return self._trained.floor

    @property
    def evaluation_floor(self) -> int:
        """In places."""
        return self._evaluated.floor

    def add(self, group_id: int) -> None:
        """Settle one group."""
        if is_evaluation(group_id):
            self._evaluated.add(evaluation_place(group_id))
        else:
            self._trained.add(group_id)

    def snapshot(self) -> SettledState:
        """As it is told to the keepers."""
        evaluated = (evaluation_group_id(place) for place in self._evaluated.above)
        above = sorted((*evaluated, *self._trained.above))
        sequence = self._trained.count + self._evaluated.count
        return SettledState(sequence, self._trained.floor, tuple(above), self._evaluated.floor)

    def restore(self, state: SettledState) -> None:
        """As this was told."""
        self._trained.floor, self._evaluated.floor = state.floor, state.evaluation_floor
        self._evaluated.above = {evaluation_place(group_id) for group_id in state.above if is_evaluation(group_id)}
        self._trained.above = {group_id for group_id in state.above if not is_evaluation(group_id)}

    def validate(self) -> None:
        """Assert the invariants."""
        self._trained.validate()
        self._evaluated.validate()


class SettledPlaces:
    """A floor and the exceptions above it."""

    def __init__(self) -> None:
        self.floor = 0
        self.above: set[int] = set()

    def __contains__(self, place: int) -> bool:
        return place < self.floor or place in self.above

    @property
    def count(self) -> int:
        """Of all that are settled."""
        return self.floor + len(self.above)

    def add(self, place: int) -> None:
        """Settle one."""
        assert place not in self, f"{place} is settled already"
        self.above.add(place)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1

    def validate(self) -> None:
        """Assert the invariants."""
        assert all(place > self.floor for place in self.above)


class Accounts:
    """Counts of issued and ended samples."""

    def __init__(self, samples_per_group: int) -> None:
        self._samples_per_group = samples_per_group
        self._issued = 0
        self._ended: dict[tuple[TerminalState, str], list[int]] = {}
        self._generated_tokens = 0
        self.in_system_tokens = 0
        """Of responses that have come and not ended."""
        self.num_open_groups = 0
        self.num_in_evaluation = 0
        """Samples of an evaluation that have not ended."""

    def granted(self, num_groups: int) -> None:
        """Groups were granted."""
        self._issued += num_groups * self._samples_per_group
        self.num_open_groups += num_groups

    def admitted(self, entry: GroupRecorded) -> None:
        """A group has come, and is to be trained."""
        num_made = made_tokens(entry)
        self._generated_tokens += num_made
        self.in_system_tokens += num_made

    def trained(self, entry: GroupRecorded) -> None:
        """A group that was admitted was trained: its samples, and those that had ended otherwise."""
        self.in_system_tokens -= made_tokens(entry)
        for sample in entry.samples:
            self._count(TerminalState.TRAINED, "", sample.num_tokens, sample.num_given_tokens)
        self._close_with(entry.ended, [sample.index for sample in entry.samples])

    def closed(self, ended: Iterable[SampleEnd], admitted: GroupRecorded | None = None) -> None:
        """A group ended otherwise; ``admitted``: as it had come before. One that had not comes now."""
        ended = tuple(ended)
        if admitted is None:
            self._generated_tokens += sum(end.num_made_tokens for end in ended)
        else:
            self.in_system_tokens -= made_tokens(admitted)
        self._close_with(ended, [])

    def evaluation_opened(self, num_samples: int) -> None:
        """So many samples are to be evaluated."""
        self._issued += num_samples
        self.num_in_evaluation += num_samples

    def evaluated(self, samples: Iterable[EvaluatedSample], missing: Iterable[SampleEnd]) -> None:
        """A group of an evaluation has come, and with that ended."""
        for sample in samples:
            self._generated_tokens += sample.num_made_tokens
            self._count(TerminalState.EVALUATED, "", sample.num_tokens, sample.num_given_tokens)
            self.num_in_evaluation -= 1
        for end in missing:
            self._generated_tokens += end.num_made_tokens
            self._count(end.state, end.cause, end.num_tokens, end.num_given_tokens)
            self.num_in_evaluation -= 1

    def balance(self) -> Balance:
        """Both sides as they stand."""
        ended = tuple(
            CauseCount(
                state=state.value, cause=cause, num_samples=counts[0], num_tokens=counts[1], num_given_tokens=counts[2]
            )
            for (state, cause), counts in sorted(self._ended.items())
        )
        return Balance(
            issued=self._issued,
            in_system=self.num_open_groups * self._samples_per_group + self.num_in_evaluation,
            ended=ended,
            generated_tokens=self._generated_tokens,
            in_system_tokens=self.in_system_tokens,
        )

    def restore(self, balance: Balance, *, num_open_groups: int, num_in_evaluation: int) -> None:
        """As this balance was."""
        self._issued = balance.issued
        self._ended = {
            (TerminalState(each.state), each.cause): [each.num_samples, each.num_tokens, each.num_given_tokens]
            for each in balance.ended
        }
        self._generated_tokens = balance.generated_tokens or 0
        self.in_system_tokens = balance.in_system_tokens
        self.num_open_groups, self.num_in_evaluation = num_open_groups, num_in_evaluation

    def _close_with(self, ended: Iterable[SampleEnd], indices: list[int]) -> None:
        for end in ended:
            self._count(end.state, end.cause, end.num_tokens, end.num_given_tokens)
            indices.append(end.key.index)
        self._issued += sum(1 for index in indices if index >= self._samples_per_group)
        self.num_open_groups -= 1

    def _count(self, state: TerminalState, cause: str, num_tokens: int, num_given: int) -> None:
        counts = self._ended.setdefault((state, cause), [0, 0, 0])
        counts[0] += 1
        counts[1] += num_tokens
        counts[2] += num_given


def made_tokens(entry: GroupRecorded) -> int:
    """Tokens that the model made, of all samples of a group that was admitted."""
    trainable = sum(sample.num_made_tokens for sample in entry.samples)
    return trainable + sum(end.num_made_tokens for end in entry.ended)
