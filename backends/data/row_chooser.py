"""Which row of the dataset a group is drawn from: hard ones again, the one that a curriculum wants, or the next.

Invariants:

* Rows and their order are pure functions of the run's seed, the group's id and what it was told; so are equal chances.
* The history of a row follows from the list of outcomes alone, which the ledger has.
* A row of a group that is on its way is not chosen again while there is any other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.draws import mixed, uniform
from penstock.messages.base import Value
from penstock.messages.flow import GroupRow
from penstock.messages.rows import ReplayOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.messages.commands import ChooseRows
    from penstock.messages.flow import RowOutcome

_REPLAYS, _CANDIDATES, _TIES = range(3)
"""Streams of random numbers of one run."""


class ChoosingSettings(Value, frozen=True, kw_only=True):
    """How rows are chosen."""

    seed: int
    num_rows: int
    has_priority: bool = False
    num_candidates: int = 1024
    replay: ReplayOptions | None = None


class RowRecord(msgspec.Struct):
    """What has come of one row."""

    seen: int = 0
    """Groups that were drawn from it and came in, those that were turned away among them."""
    rejected: int = 0
    num_rewarded: int = 0
    """Groups with rewards."""
    total_reward: float = 0.0
    """Sum of the mean rewards of its groups."""
    last_reward: float | None = None
    """Mean reward of the last group that had any."""
    last_outcome: int = -1
    """Place of its last outcome in the list."""
    low_streak: int = 0
    """Groups in a row that earned less than the limit for a replay."""

    @property
    def mean_reward(self) -> float | None:
        return self.total_reward / self.num_rewarded if self.num_rewarded else None


class RowChooser:
    """Folds outcomes and chooses rows."""

    def __init__(
        self,
        settings: ChoosingSettings,
        priorities: Callable[[Sequence[tuple[int, RowRecord]]], Sequence[float | None]] | None = None,
    ) -> None:
        """
        Args:
            settings: of the run.
            priorities: gives a number, or None for "not now", for each of these rows; None: there is no curriculum.
        """
        self._settings = settings
        self._priorities = priorities
        self._records: dict[int, RowRecord] = {}
        self._num_outcomes = 0
        self._hard: dict[int, None] = {}
        """Rows that may be drawn again, the one whose last outcome is oldest first."""
        self._known: dict[int, float | None] = {}
        """Priorities that still hold: the history of their rows is the same."""
        self.num_replayed = 0

    def choose(self, command: ChooseRows) -> tuple[GroupRow, ...]:
        """A row for each of the groups."""
        self._take(command.outcomes)
        busy, stream = set(command.in_flight), iter(command.stream)
        chosen: list[GroupRow] = []
        for group_id in command.group_ids:
            row = self._replayed(group_id, busy)
            if row is None and self._settings.has_priority:
                row = self._preferred(group_id, busy)
            if row is None:
                place = next(stream)
                found = GroupRow(group_id, place.row, place.epoch, place.position)
            else:
                found = GroupRow(group_id, row, self._record(row).seen, -1)
            busy.add(found.row)
            chosen.append(found)
        return tuple(chosen)

    # --- history ----------------------------------------------------------------------------------------------

    def _record(self, row: int) -> RowRecord:
        return self._records.get(row) or RowRecord()

    def _take(self, outcomes: Iterable[RowOutcome]) -> None:
        for outcome in outcomes:
            if outcome.end:
                continue  # it came in before, or nobody judged it
            record = self._records.setdefault(outcome.row, RowRecord())
            record.seen += 1
            record.rejected += outcome.is_rejected
            record.last_outcome = self._num_outcomes
            self._num_outcomes += 1
            if outcome.reward is not None:
                record.num_rewarded += 1
                record.total_reward += outcome.reward
                record.last_reward = outcome.reward
            self._known.pop(outcome.row, None)
            self._note_hard(outcome.row, record, outcome.reward)

    def _note_hard(self, row: int, record: RowRecord, reward: float | None) -> None:
        replay = self._settings.replay
        if replay is None or reward is None:
            return
        self._hard.pop(row, None)
        record.low_streak = record.low_streak + 1 if reward < replay.below_reward else 0
        if record.low_streak > replay.max_times:
            record.low_streak = 0  # it has had its chances; the next time that it fails they begin anew
        elif record.low_streak:
            self._hard[row] = None

    # --- choices ----------------------------------------------------------------------------------------------

    def _replayed(self, group_id: int, busy: set[int]) -> int | None:
        replay = self._settings.replay
        if replay is None or uniform(self._settings.seed, _REPLAYS, group_id) >= replay.fraction:
            return None
        for row in self._hard:
            if self._num_outcomes - self._records[row].last_outcome <= replay.min_gap:
                return None  # the others came in later still
            if row not in busy:
                self.num_replayed += 1
                return row
        return None

    def _preferred(self, group_id: int, busy: set[int]) -> int | None:
        """None when no candidate is wanted now."""
        seed = self._settings.seed
        rows = [row for row in self._candidates(group_id) if row not in busy]
        unknown = [row for row in rows if row not in self._known]
        if unknown:
            assert self._priorities is not None, "there is a curriculum"
            found = self._priorities([(row, self._record(row)) for row in unknown])
            self._known.update(zip(unknown, found, strict=True))
        best: tuple[float, int, int] | None = None
        chosen: int | None = None
        for row in rows:
            priority = self._known[row]
            if priority is None or math.isnan(priority):
                continue
            rank = (priority, -self._record(row).seen, mixed(seed, _TIES, group_id, row))
            if best is None or rank > best:
                best, chosen = rank, row
        return chosen

    def _candidates(self, group_id: int) -> Iterable[int]:
        settings = self._settings
        if settings.num_rows <= settings.num_candidates:
            return range(settings.num_rows)
        drawn = (
            mixed(settings.seed, _CANDIDATES, group_id, index) % settings.num_rows
            for index in range(settings.num_candidates)
        )
        return dict.fromkeys(drawn)
