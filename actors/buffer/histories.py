"""What has come of groups, in the order of the ledger: which the Filter turned away and why, and what became of rows.

Invariants:

* Both follow from the ledger's entries alone, so a Buffer that is built from them knows the same.
* A group has at most one outcome: that of its admission, or of being turned away. One that nobody judged has none.
  Where a source of the user's is told of ends, one that came in has its end as well, and so has one that nobody judged.
* A group that came in and has no recorded row was drawn by its place in the stream of prompts: where rows are chosen,
  none is issued before its row is recorded. So the entries say in which of the two ways a run was begun.
* When a run that was begun by places goes on with chosen rows, the groups that are outstanding then keep the rows of
  their places, and the choice begins behind the last place that was granted: no row is passed over or comes twice.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.base import Metric
from penstock.messages.books import KeptPlaces, KeptRejections
from penstock.messages.flow import DemandGranted, GroupRow, RowOutcome
from penstock.messages.samples import TerminalState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.actors.buffer.table import TrackedGroup
    from penstock.messages.flow import GrantSpan
    from penstock.messages.ledger import GroupClosed, GroupRecorded, RowsRecorded

OUTCOMES_AT_ONCE: Final = 2000
REQUEUED: Final = "requeued"
MAX_CAUSE_CHARACTERS: Final = 200
MAX_CAUSES: Final = 30
"""Of each kind that have a figure of their own; users may return as many causes as they like."""


class Rejections:
    """Groups that were turned away or kept in spite of it, by cause."""

    def __init__(self) -> None:
        self.num_since_progress = 0
        """Turned away since the run last came nearer to its goal."""
        self._rejected: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def closed(self, entry: GroupClosed) -> None:
        """A group ended otherwise than by training."""
        if entry.rejected_cause:
            self.num_since_progress += 1
            self._rejected[entry.rejected_cause] += 1

    def admitted(self, entry: GroupRecorded) -> None:
        """A group was admitted."""
        if entry.kept_cause:
            self._kept[entry.kept_cause] += 1

    def kept(self) -> KeptRejections:
        """What a snapshot has of it."""
        rejected, kept = tuple(sorted(self._rejected.items())), tuple(sorted(self._kept.items()))
        return KeptRejections(num_since_progress=self.num_since_progress, rejected=rejected, kept=kept)

    def restore(self, kept: KeptRejections) -> None:
        """As it was then."""
        self.num_since_progress = kept.num_since_progress
        self._rejected, self._kept = Counter(dict(kept.rejected)), Counter(dict(kept.kept))

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

    def __init__(self, row_of: Callable[[int], tuple[int, int]] | None = None, *, tells_ends: bool = False) -> None:
        """
        Args:
            row_of: row and epoch of a place in the stream of prompts; None: nobody chooses rows.
            tells_ends: the list has the ends of groups too, and the rewards of their samples.
        """
        self.next_position = 0
        """In the stream of prompts: the first that no recorded row has taken."""
        self.is_recording = False
        """Rows of this run are recorded from here on."""
        self._row_of = row_of
        self._num_by_place = 0
        """Groups that came in and were drawn by their places."""
        self._num_granted = 0
        """Places that were granted before any row was recorded."""
        self._again_by_place: set[int] = set()
        """Ordinals of those of them that are granted anew."""
        self._rows = array("q")
        self._rewards = array("d")
        """NaN where no reward came."""
        self._is_rejected = bytearray()
        self._tells_ends = tells_ends
        self._told: list[bytes] = []
        """The list as msgpack, where it has more than the three above."""
        self._again: dict[int, GroupRow] = {}
        """Rows of groups that are granted anew, by ordinal."""

    def __len__(self) -> int:
        return len(self._told) if self._tells_ends else len(self._rows)

    @property
    def begins(self) -> bool:
        """Whether rows are chosen from now on, and were drawn by their places so far."""
        return self._row_of is not None and self._num_by_place > 0 and not self.is_recording

    def granted(self, span: GrantSpan) -> None:
        """These groups may start."""
        if not self.is_recording:
            self._num_granted = max(self._num_granted, span.first_ordinal + span.num_groups)

    def recorded(self, entry: RowsRecorded) -> None:
        """Rows were recorded."""
        if not self.is_recording:
            self.is_recording = True
            self.next_position = self._num_granted if self._num_by_place else 0
        for row in entry.rows:
            self.next_position = max(self.next_position, row.position + 1)

    def by_place(self, groups: Iterable[TrackedGroup]) -> tuple[GroupRow, ...]:
        """The rows that these groups have by their places."""
        return tuple(self._placed(tracked.group_id, tracked.ordinal) for tracked in groups)

    def _placed(self, group_id: int, ordinal: int) -> GroupRow:
        assert self._row_of is not None, "somebody chooses rows"
        return GroupRow(group_id, *self._row_of(ordinal), ordinal)

    def admitted(self, tracked: TrackedGroup, entry: GroupRecorded) -> None:
        """A group came in with its rewards."""
        rewards = tuple(note.reward for note in entry.samples if note.reward is not None)
        self._came_in(tracked, sum(rewards) / len(rewards) if rewards else None, is_rejected=False, rewards=rewards)

    def trained(self, tracked: TrackedGroup) -> None:
        """A group was trained."""
        self._ended(tracked, TerminalState.TRAINED, "")

    def closed(self, tracked: TrackedGroup, entry: GroupClosed) -> None:
        """A group ended otherwise than by training."""
        if entry.rejected_cause:
            self._came_in(tracked, entry.mean_reward, is_rejected=True, cause=entry.rejected_cause)
        elif entry.ended:
            end = entry.ended[0]
            self._ended(tracked, REQUEUED if entry.is_requeued else end.state, end.cause)
        if entry.is_requeued and tracked.row is not None:
            self._again[tracked.ordinal] = tracked.row
        elif entry.is_requeued and not self.is_recording:
            self._again_by_place.add(tracked.ordinal)

    def again(self, group_id: int, ordinal: int) -> GroupRow | None:
        """The row of a prompt that is granted anew, for its new group."""
        row = self._again.get(ordinal)
        if row is None:
            is_placed = self._num_by_place > 0 and ordinal in self._again_by_place
            return self._placed(group_id, ordinal) if is_placed else None
        return GroupRow(group_id, row.row, row.epoch, row.position)

    def ended(self, ordinal: int) -> None:
        """This prompt will not be granted again."""
        self._again.pop(ordinal, None)
        self._again_by_place.discard(ordinal)

    def kept(self) -> KeptPlaces:
        """What a snapshot has of it, where nobody chooses rows."""
        assert not self.is_recording
        assert not len(self)
        again = tuple(sorted(self._again_by_place))
        return KeptPlaces(num_came_in=self._num_by_place, num_granted=self._num_granted, again=again)

    def restore(self, kept: KeptPlaces) -> None:
        """As it was then."""
        self._num_by_place, self._num_granted = kept.num_came_in, kept.num_granted
        self._again_by_place = set(kept.again)

    def outcomes(self, first: int) -> tuple[RowOutcome, ...]:
        """A stretch of the list, of a bounded size."""
        end = min(len(self), first + OUTCOMES_AT_ONCE)
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

    def _ended(self, tracked: TrackedGroup, end: str, cause: str) -> None:
        if self._tells_ends and tracked.row is not None:
            self._tell(RowOutcome(tracked.row.row, None, False, end, cause[:MAX_CAUSE_CHARACTERS]))

    def _tell(self, outcome: RowOutcome) -> None:
        self._told.append(msgspec.msgpack.encode(outcome))

    def _came_in(
        self,
        tracked: TrackedGroup,
        reward: float | None,
        *,
        is_rejected: bool,
        cause: str = "",
        rewards: tuple[float, ...] = (),
    ) -> None:
        row = tracked.row
        if row is None and not self.is_recording:
            self._num_by_place += 1
            row = None if self._row_of is None else self._placed(tracked.group_id, tracked.ordinal)
        if row is not None and self._tells_ends:
            self._tell(RowOutcome(row.row, reward, is_rejected, "", cause[:MAX_CAUSE_CHARACTERS], rewards))
        elif row is not None:
            self._rows.append(row.row)
            self._rewards.append(float("nan") if reward is None else reward)
            self._is_rejected.append(is_rejected)

    def _outcome(self, index: int) -> RowOutcome:
        if self._tells_ends:
            return msgspec.msgpack.decode(self._told[index], type=RowOutcome)
        reward = self._rewards[index]
        return RowOutcome(self._rows[index], None if reward != reward else reward, bool(self._is_rejected[index]))
