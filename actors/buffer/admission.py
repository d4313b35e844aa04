"""Groups come in: admitted, or turned away, and what is heard of them before.

Invariants: a group comes in once, with one sample for each of its places at most. What is heard of one that is not
awaited changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.books import recorded
from penstock.actors.buffer.decisions import is_kept
from penstock.actors.buffer.failures import EarlyFailures
from penstock.actors.buffer.phases import Phase
from penstock.actors.buffer.table import Status
from penstock.messages.ledger import FailuresNoted, GroupClosed, RowsRecorded
from penstock.messages.names import SUPERVISOR
from penstock.messages.samples import TerminalState, is_evaluation
from penstock.messages.training import OnStale

if TYPE_CHECKING:
    from penstock.actors.buffer.bookkeeper import Bookkeeper
    from penstock.actors.buffer.run_state import RunState
    from penstock.messages.flow import FailuresTold, GroupRejected, RowsChosen
    from penstock.messages.samples import Group


class Admission:
    """What the Filter says of groups of training, and PromptSource of their rows."""

    def __init__(self, keeper: Bookkeeper, run: RunState) -> None:
        self._keeper, self._run, self._books = keeper, run, keeper.books
        self._early = EarlyFailures(keeper.books.settings.stop_after_failures)

    def admitted(self, group: Group, kept_cause: str = "") -> None:
        tracked = self._books.table.get(group.group_id)
        if tracked is None or tracked.status is not Status.GRANTED:
            return
        if story := self._refusal(group, tracked.min_version):
            self._run.fail(story)
            return
        oldest = group.oldest_version
        deadline = tracked.deadline if oldest is None else max(tracked.deadline, oldest + tracked.max_staleness)
        self._keeper.note(recorded(group, deadline, kept_cause))
        self._keeper.outbox.came_in(sample.key for sample in group.samples)
        self._keeper.out.extend(self._keeper.outbox.soon())
        if (report := self._books.goal.report(self._books)) is not None:
            self._keeper.send(SUPERVISOR, report)
        if self._books.policy.on_stale is OnStale.MASK:
            self._keeper.expire()  # it may be old throughout; what else expires does so with the version

    def _refusal(self, group: Group, min_version: int) -> str:
        """Why the run ends rather than take this group; empty: it is as it has to be."""
        oldest, size = group.oldest_version, self._books.settings.samples_per_group
        if oldest is not None and oldest < min_version:
            return f"group {group.group_id} has a token of version {oldest}, it was granted for {min_version}"
        indices = [sample.key.index for sample in group.samples]
        if len({index % size for index in indices}) < len(indices):
            return f"group {group.group_id} has a place twice: samples {indices}, and each group has {size} places"
        return ""

    def rejected(self, event: GroupRejected) -> None:
        tracked = self._books.table.get(event.group_id)
        if tracked is None or tracked.status is not Status.GRANTED:
            return
        if event.group is not None and is_kept(self._books, event):
            self.admitted(event.group, event.cause)
            return
        self._keeper.close(
            GroupClosed(
                group_id=event.group_id,
                ended=event.ended,
                rejected_cause=event.cause,
                mean_reward=event.mean_reward,
            )
        )
        self._keeper.outbox.came_in(end.key for end in event.ended if end.state is not TerminalState.CANCELLED)
        num_rejected = self._books.rejections.num_since_progress
        limit = self._books.settings.max_rejected_batches * self._books.settings.groups_per_batch
        if num_rejected >= limit and self._run.phase is Phase.RUNNING:
            advice = "The task may be too hard or too easy for this model, or the filter too strict: look at filter.*"
            if any(end.reason for end in event.ended):
                advice = f"{self._books.failures.told()}. Mend that, or look"
            self._run.fail(
                f"{num_rejected} groups in a row were turned away without one batch (the last: {event.cause}). "
                f"{advice} and at the rewards, or raise staleness.max_rejected_batches"
            )

    def failed(self, event: FailuresTold) -> None:
        """Note what is news of groups that have not come in, and end a run in which everything fails."""
        failures = self._books.failures
        ends = failures.news(end for end in event.ends if self._books.awaits(end.key.group_id))
        if not ends:
            return
        self._keeper.note(FailuresNoted(ends=ends))
        self._keeper.out.extend(self._keeper.outbox.soon())
        trained = [end for end in ends if not is_evaluation(end.key.group_id)]
        story = self._early.hear(trained, has_scored=failures.has_scored or event.has_scored)
        if story and self._run.phase in (Phase.FILLING, Phase.RUNNING):
            self._run.fail(story)

    def rows_chosen(self, event: RowsChosen) -> None:
        """Record what is new, and say everything again: PromptSource issues what comes back to it."""
        is_behind = event.num_outcomes != self._keeper.outbox.num_known_outcomes
        self._keeper.outbox.num_known_outcomes = min(event.num_outcomes, len(self._books.history))
        new = tuple(
            row
            for row in event.rows
            if (tracked := self._books.table.get(row.group_id)) is not None
            and tracked.status is Status.GRANTED
            and tracked.row is None
        )
        if new:
            self._keeper.note(RowsRecorded(rows=new))
        if new or is_behind or not event.rows:
            self._keeper.out.extend(self._keeper.outbox.demand())
