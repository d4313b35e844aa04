"""What has come of groups, in the order of the ledger: which the Filter turned away and why, and what became of rows.

Invariants:

* Both follow from the ledger's entries alone, so a Buffer that is built from them knows the same.
* A group has at most one outcome: that of its admission, or of being turned away. One that nobody judged has none.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.messages.base import Metric
from penstock.messages.flow import DemandGranted, GroupRow, RowOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.buffer.table import TrackedGroup
    from penstock.messages.ledger import GroupClosed, GroupRecorded

OUTCOMES_AT_ONCE: Final = 2000
MAX_CAUSES: Final = 30
"""Of each kind that have a figure of their own; users may return as many causes as they like."""


class Rejections:
    """Groups that were turned away or kept in spite of it, by cause."""

    def __init__(self) -> None:
        self.num_since_batch = 0
        """Turned away since the last batch was formed, or, where groups are only collected, since the last of them."""
        self._rejected: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def closed(self, entry: GroupClosed) -> None:
        """A group ended otherwise than by training."""
        if entry.rejected_cause:
            self.num_since_batch += 1
            self._rejected[entry.rejected_cause] += 1

    def admitted(self, entry: GroupRecorded, *, is_collecting: bool) -> None:
        """A group was admitted; ``is_collecting``: and that is all that is wanted of it."""
        if is_collecting:
            self.num_since_batch = 0
        if entry.kept_cause:
            self._kept[entry.kept_cause] += 1

    def batch_formed(self) -> None:
        """What is turned away from here on counts anew."""
        self.num_since_batch = 0

    def metrics(self) -> tuple[Metric, ...]:
        """Totals of the run, in groups; of the most frequent causes first."""
        return (*_by_cause("filter/rejected", self._rejected), *_by_cause("filter/kept", self._kept))


def _by_cause(prefix: str, counts: Counter[str]) -> list[Metric]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    metrics = [Metric(f"{prefix}/{cause_name(cause)}", number) for cause, number in ranked[:MAX_CAUSES]]
    if rest := sum(number for _, number in ranked[MAX_CAUSES:]):
        metrics.append(Metric(f"{prefix}/other", rest))
    return metrics


def cause_name(cause: str) -> str:
    """A user's cause as part of a metric's name: one word."""
    return "_".join(cause.replace("/", "_").split())[:60] or "none"


class RowHistory:
    """The list of outcomes, and the rows of requeued groups; empty unless rows are chosen."""

    def __init__(self) -> None:
        self.next_position = 0
        """In the stream of prompts: the first that no recorded row has taken."""
        self._rows = array("q")
        self._rewards = array("d")
        """NaN where no reward came."""
        self._is_rejected = bytearray()
        self._again: dict[int, GroupRow] = {}
        """Rows of groups that are granted anew, by ordinal."""

    def __len__(self) -> int:
        return len(self._rows)

    def recorded(self, row: GroupRow) -> None:
        """A row was recorded."""
        self.next_position = max(self.next_position, row.position + 1)

    def admitted(self, tracked: TrackedGroup, entry: GroupRecorded) -> None:
        """A group came in with its rewards."""
        rewards = [note.reward for note in entry.samples if note.reward is not None]
        self._note(tracked.row, sum(rewards) / len(rewards) if rewards else None, is_rejected=False)

    def closed(self, tracked: TrackedGroup, entry: GroupClosed) -> None:
        """A group ended otherwise than by training."""
        if entry.rejected_cause:
            self._note(tracked.row, entry.mean_reward, is_rejected=True)
        if entry.is_requeued and tracked.row is not None:
            self._again[tracked.ordinal] = tracked.row

    def again(self, group_id: int, ordinal: int) -> GroupRow | None:
        """The row of a prompt that is granted anew, for its new group."""
        row = self._again.get(ordinal)
        return None if row is None else GroupRow(group_id, row.row, row.epoch, row.position)

    def ended(self, ordinal: int) -> None:
        """This prompt will not be granted again."""
        self._again.pop(ordinal, None)

    def outcomes(self, first: int) -> tuple[RowOutcome, ...]:
        """A stretch of the list, of a bounded size."""
        end = min(len(self._rows), first + OUTCOMES_AT_ONCE)
        return tuple(self._outcome(index) for index in range(first, end))

    def fill(self, demand: DemandGranted, groups: Iterable[TrackedGroup], *, num_known: int) -> DemandGranted:
        """The same demand with the recorded rows of these groups and with outcomes from ``num_known`` on."""
        return DemandGranted(
            total=demand.total,
            spans=demand.spans,
            settled=demand.settled,
            rows=tuple(tracked.row for tracked in groups if tracked.row is not None),
            next_position=self.next_position,
            first_outcome=num_known,
            outcomes=self.outcomes(num_known),
            num_outcomes=len(self),
        )

    def _note(self, row: GroupRow | None, reward: float | None, *, is_rejected: bool) -> None:
        if row is not None:
            self._rows.append(row.row)
            self._rewards.append(float("nan") if reward is None else reward)
            self._is_rejected.append(is_rejected)

    def _outcome(self, index: int) -> RowOutcome:
        reward = self._rewards[index]
        return RowOutcome(self._rows[index], None if reward != reward else reward, bool(self._is_rejected[index]))
