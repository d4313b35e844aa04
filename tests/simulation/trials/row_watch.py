"""Which row each group is drawn from, watched from outside.

Invariants that it asserts:

* All samples of a group are of one row, whoever issues them and however often.
* A group has the row that is recorded for it; where none is, that of its place in the stream of prompts.
* A recorded row is issued after it is recorded. When a run goes on with chosen rows, what was issued keeps its row.
* Every place of the stream is taken by one prompt, and each source of a mixture has had its share of the places up to
  any of them, to within one.
* A source gives each of its rows once before it gives any of them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from penstock.messages.rows import RowSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.messages.flow import GrantSpan, GroupRow
    from penstock.messages.ledger import RowsRecorded


class RowRules(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are drawn in a trial."""

    sources: tuple[RowSource, ...]
    chooses: bool = False
    """From the first drive on, and in each of them."""
    may_choose: bool = False
    """In one drive at least."""
    row_of: Callable[[int], tuple[int, int]]
    """Row and epoch of a place."""


class RowWatch:
    """Rows of groups by what is issued and what is recorded."""

    def __init__(self, rules: RowRules) -> None:
        self.rules = rules
        self._ordinals: dict[int, int] = {}
        """Of groups that were granted."""
        self._issued: dict[int, int] = {}
        """Rows of groups of which a sample was issued."""
        self._recorded: dict[int, GroupRow] = {}
        self._taken: dict[int, tuple[int, int]] = {}
        """Places, each with the ordinal that took it and its row."""
        self._is_recording = False
        self._has_come_in = False

    def granted(self, span: GrantSpan) -> None:
        """These groups may start."""
        for offset in range(span.num_groups):
            self._ordinals[span.first_group + offset] = span.first_ordinal + offset

    def issued(self, group_id: int, row: int) -> None:
        """A sample of this group is sent to an engine with the prompt of this row."""
        first = self._issued.setdefault(group_id, row)
        assert first == row, f"a sample of group {group_id} is of row {row}, another was of row {first}"
        recorded = self._recorded.get(group_id)
        if recorded is not None:
            assert recorded.row == row, f"group {group_id} is issued with row {row}, {recorded.row} is recorded"
            return
        is_by_place = not (self.rules.chooses or self._is_recording)
        assert is_by_place, f"group {group_id} is issued before its row is recorded"
        ordinal = self._ordinals[group_id]
        assert row == self.rules.row_of(ordinal)[0], f"group {group_id} is issued with row {row}, not that of its place"
        self._take(ordinal, ordinal, row)

    def recorded(self, entry: RowsRecorded) -> None:
        """The ledger says which rows these groups are drawn from."""
        assert self.rules.may_choose, "rows are recorded, and nobody chooses any"
        if not self._is_recording and not self._has_come_in:
            self._issued.clear()  # the machine was lost before anything came of it
            self._taken.clear()
        for row in entry.rows:
            assert row.group_id not in self._recorded, f"group {row.group_id} is given two rows"
            ordinal = self._ordinals[row.group_id]
            if row.group_id in self._issued:
                is_first = not self._is_recording and not self.rules.chooses
                assert is_first, f"{row} is recorded after it was issued"
                assert (row.position, row.row) == (ordinal, self._issued[row.group_id]), f"{row} was issued otherwise"
            self._recorded[row.group_id] = row
            if row.position >= 0:
                self._take(row.position, ordinal, row.row)
        self._is_recording = True

    def admitted(self, group_id: int, row: int) -> None:
        """A group was admitted with the prompt of this row."""
        assert self._issued[group_id] == row, f"group {group_id} came in with row {row}"
        self._has_come_in = True

    def rejected(self) -> None:
        """A group was turned away."""
        self._has_come_in = True

    def _take(self, place: int, ordinal: int, row: int) -> None:
        taken = self._taken.setdefault(place, (ordinal, row))
        assert taken == (ordinal, row), f"place {place} is taken by prompt {ordinal} (row {row}) and by {taken}"

    def assert_ended(self) -> None:
        """The places from the first on, as far as all of them are known."""
        counts = Counter[int]()
        given = Counter[int]()
        total = sum(source.share for source in self.rules.sources)
        for number, row in enumerate(self._known(), start=1):
            index = self._source_of(row)
            source = self.rules.sources[index]
            assert given[row] == counts[index] // source.num_rows, f"row {row} of {source.name} comes out of turn"
            counts[index] += 1
            given[row] += 1
            for each, other in enumerate(self.rules.sources):
                share = number * other.share / total if total else counts[each]
                assert abs(counts[each] - share) <= 1 + 1e-9, f"{counts[each]} of {number} prompts are of {other.name}"

    def _known(self) -> Iterator[int]:
        """Rows of the places in their order, up to the first that nobody is known to have taken."""
        for place in range(len(self._taken)):
            taken = self._taken.get(place)
            if taken is None:
                return
            yield taken[1]

    def _source_of(self, row: int) -> int:
        first = 0
        for index, source in enumerate(self.rules.sources):
            if row < first + source.num_rows:
                return index
            first += source.num_rows
        raise AssertionError(f"there is no row {row}")
