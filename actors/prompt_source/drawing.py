"""Rows that are chosen: which groups still need one, which rows are chosen and not known to be recorded yet.

Invariants:

* A group is fetched, and so issued, only with the row that the Buffer says is recorded. What was chosen here and is not
  recorded counts for nothing: a PromptSource that replaces this one chooses anew.
* Rows are chosen when every outcome that the Buffer has named is known here, so the choice follows from what is
  recorded, and one choice at a time is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.commands import ChooseRows, PromptRequest, Send, StreamPlace
from penstock.messages.flow import RowsChosen
from penstock.messages.names import BUFFER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from penstock.messages.commands import AnyCommand
    from penstock.messages.flow import DemandGranted, GroupRow, RowOutcome


class RowDrawing:
    """What PromptSource knows of rows that are chosen."""

    def __init__(self, row_at: Callable[[int], tuple[int, int]]) -> None:
        """``row_at``: row and epoch at a place in the stream of prompts."""
        self._row_at = row_at
        self.num_outcomes = 0
        """Of the run's list, known here."""
        self._new_outcomes: list[RowOutcome] = []
        """Those that the backend has not been told."""
        self._is_level = True
        """Every outcome that the Buffer has named is known."""
        self._waiting: set[int] = set()
        """Groups that need a row."""
        self._asked: set[int] = set()
        """Those of them that the backend is choosing for."""
        self._chosen: dict[int, GroupRow] = {}
        """Chosen, and not known to be recorded."""
        self._recorded_rows: tuple[int, ...] = ()
        """Of groups that are on their way."""
        self._next_position = 0
        self._must_tell = False

    def heard(self, event: DemandGranted, new: Iterable[int]) -> list[PromptRequest]:
        """What the Buffer has granted and recorded; ``new``: groups that are not known here yet. What can be fetched
        now."""
        self._waiting.update(new)
        self._next_position = max(self._next_position, event.next_position)
        self._recorded_rows = tuple(row.row for row in event.rows)
        self._learn(event)
        found: list[PromptRequest] = []
        for row in event.rows:
            if row.group_id in self._waiting:
                self.forget((row.group_id,))
                found.append(PromptRequest(row.group_id, row.row, row.epoch))
        return found

    def _learn(self, event: DemandGranted) -> None:
        known_of = self.num_outcomes - event.first_outcome
        if known_of >= 0:
            fresh = event.outcomes[known_of:]
            self._new_outcomes += fresh
            self.num_outcomes += len(fresh)
        self._is_level = self.num_outcomes >= event.num_outcomes
        self._must_tell |= not self._is_level

    def drawn(self, rows: Iterable[GroupRow]) -> None:
        """The backend has chosen."""
        self._asked = set()
        for row in rows:
            if row.group_id in self._waiting:
                self._chosen[row.group_id] = row
                self._next_position = max(self._next_position, row.position + 1)
        self._must_tell = True

    def forget(self, group_ids: Iterable[int]) -> None:
        """These have their rows, or are settled."""
        for group_id in group_ids:
            self._waiting.discard(group_id)
            self._chosen.pop(group_id, None)

    def keep(self, group_ids: Collection[int]) -> None:
        """All others are settled."""
        self.forget([group_id for group_id in self._waiting if group_id not in group_ids])

    def commands(self) -> list[AnyCommand]:
        """What is to be asked and told now."""
        out: list[AnyCommand] = []
        if self._must_tell:
            self._must_tell = False
            rows = tuple(self._chosen[group_id] for group_id in sorted(self._chosen))
            out.append(Send(BUFFER, RowsChosen(rows=rows, num_outcomes=self.num_outcomes)))
        lacking = sorted(self._waiting - self._chosen.keys())
        if lacking and self._is_level and not self._asked:
            self._asked = set(lacking)
            outcomes, self._new_outcomes = tuple(self._new_outcomes), []
            places = range(self._next_position, self._next_position + len(lacking))
            in_flight = {*self._recorded_rows, *(row.row for row in self._chosen.values())}
            stream = tuple(StreamPlace(position, *self._row_at(position)) for position in places)
            out.append(ChooseRows(tuple(lacking), stream, tuple(sorted(in_flight)), outcomes))
        return out

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._chosen.keys() <= self._waiting
