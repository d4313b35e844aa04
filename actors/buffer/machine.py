"""The Buffer: how many groups may start, what a batch is, and what is too old. Only it knows the regime.

Invariants:

* Every group below ``total`` is settled or outstanding, or both; a group is admitted, leased and trained once.
* Grants keep ``outstanding ≤ (s + η + 1 − v)·B``; batches keep the look-ahead rule (``selection.py``). Under ``wait``
  no group ever passes its deadline.
* What the Buffer knows for good is in its books (``books.py``) and in the ledger, entry by entry the same; a Buffer
  that is built from the ledger of its predecessor goes on where that one stopped.
* A recorded batch is never formed anew. It is offered, unchanged, to whatever Learner stands before it.
* Whatever the Buffer says about a group follows the record of it.
* Evaluations are beside all this (``evaluating.py``). The run ends only when none is due or open.

Its phases are those of the run (``phases.py``).

| waits for | who ends it |
|---|---|
| the first ``VersionAnnounced`` | WeightPublisher; its deadlines are those of staging and committing |
| ``LearnerReady`` | the Learner when it has started, and when it has loaded; its start deadline |
| ready groups for a batch | Filter: it admits or rejects every granted group; failed samples travel as samples do |
| the payloads of a batch that is trained again | the ledger behind it, which reads them from the disk |
| the receipt of a batch | the Learner; its own step deadline |
| engines that serve a version which is to be evaluated | Learner and WeightPublisher; their own deadlines |
| the groups of an evaluation, at the end or when it is pinned | Filter, as for training |
| ``CheckpointSaved`` at the end or on a stop | the Learner; the same deadline, and the supervisor's for a stop |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, final

from penstock.actors.buffer.admission import Admission
from penstock.actors.buffer.batching import unfit
from penstock.actors.buffer.bookkeeper import Bookkeeper
from penstock.actors.buffer.books import Books
from penstock.actors.buffer.decisions import (
    bound_of,
    next_grants,
    rows_again,
    rows_by_place,
)
from penstock.actors.buffer.evaluation_side import EvaluationSide
from penstock.actors.buffer.learner_side import LearnerSide
from penstock.actors.buffer.operator_side import OperatorSide
from penstock.actors.buffer.pacing import AutoTarget
from penstock.actors.buffer.phases import Phase
from penstock.actors.buffer.report import trained_report
from penstock.actors.buffer.run_state import RunState
from penstock.actors.buffer.snapshots import resume, snapshot_of
from penstock.actors.buffer.waiting import buffer_waits
from penstock.messages.base import Metric
from penstock.messages.commands import FetchBatch
from penstock.messages.flow import FailuresTold, GroupAdmitted, GroupRejected, RowsChosen
from penstock.messages.ledger import EngineNoted, StepRecorded, VersionRecorded
from penstock.messages.local import BatchFetched, SamplesArchived, Started, TimerFired
from penstock.messages.membership import EngineGivenUp, EngineNoticed
from penstock.messages.names import LEARNER, SUPERVISOR
from penstock.messages.operator import EnginesAsked, GrantsPaused, PolicyChanged, SaveAsked
from penstock.messages.samples import Group, is_evaluation
from penstock.messages.training import (
    CheckpointSaved,
    LearnerReady,
    OnStale,
    StepFinished,
    StopAsked,
)
from penstock.messages.weights import VersionAnnounced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.buffer.settings import BufferSettings
    from penstock.messages.books import BooksSnapshot, KeptBooks
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import BufferEvent
    from penstock.messages.ledger import BatchLeased, LedgerEntry
    from penstock.messages.membership import HeldLease
    from penstock.messages.waits import Wait


@final
class Buffer:
    """The Buffer's state machine."""

    def __init__(
        self,
        settings: BufferSettings,
        policy: StalenessPolicy,
        records: Iterable[LedgerEntry] = (),
        *,
        row_of: Callable[[int], tuple[int, int]] | None = None,
        kept: KeptBooks | None = None,
    ) -> None:
        """
        Args:
            settings: of the run.
            policy: that of the scenario; a recorded change of policy takes its place.
            records: the ledger of the run so far, oldest first.
            row_of: row and epoch of a place in the stream of prompts, where rows are chosen.
            kept: what the same ledger has of the books; ``records`` are read where that cannot be used.

        Raises:
            UserFault: the ledger is that of another run.
        """
        self.settings = settings
        self.books = Books(settings, policy, row_of)
        self._why_folded = resume(self.books, records, kept)
        self.books.check_evaluation()
        self.target = AutoTarget.of(settings.pacing)
        self.learner = LearnerSide(self.books)
        self._keeper = Bookkeeper(self.books)
        self._outbox = self._keeper.outbox
        self._evaluation = EvaluationSide(self._keeper)
        self.run = RunState(self._keeper, self.learner, self._evaluation)
        self._admission = Admission(self._keeper, self.run)
        self._operator = OperatorSide(self._keeper, self.run, self.target)

    @property
    def state(self) -> str:
        """For people: the phase, or what is done again."""
        if self.run.phase is Phase.RUNNING and self.learner.stand is not None and not self.learner.is_level:
            return f"batch {self.learner.stand + 1} of {self.books.version} again"
        if self.run.phase is Phase.RUNNING and self.books.is_paused:
            return "new grants are paused by the operator"
        return self.run.phase.value

    @property
    def version(self) -> int:
        """Batches trained and recorded."""
        return self.books.version

    @property
    def policy(self) -> StalenessPolicy:
        """Which new grants follow."""
        return self.books.policy

    def snapshot(self) -> BooksSnapshot | None:
        """Of the books, as far as they follow from what is recorded; None where there can be none."""
        return snapshot_of(self.books) if self.run.phase in (Phase.FILLING, Phase.RUNNING) else None

    def leases(self) -> tuple[HeldLease, ...]:
        """What came in since settlements were last told."""
        return self._outbox.leases()

    def handle(self, event: BufferEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        self.run.steps.cause = type(event)
        match event:
            case GroupAdmitted():
                if is_evaluation(event.group.group_id):
                    self._on_evaluated(event.group)
                else:
                    self._admission.admitted(event.group)
            case GroupRejected():
                self._admission.rejected(event)
            case FailuresTold():
                self._admission.failed(event)
            case RowsChosen():
                self._admission.rows_chosen(event)
            case VersionAnnounced():
                if self.books.announced is None or event.version > self.books.announced:
                    self._keeper.note(VersionRecorded(version=event.version))
            case StepFinished():
                self._on_step(event)
            case LearnerReady():
                self._on_learner(event)
            case BatchFetched():
                self._on_fetched(event)
            case CheckpointSaved():
                self.run.checkpoint_saved(event)
                self._operator.saved()
            case SamplesArchived():
                self.run.archived(event.last_version)
            case PolicyChanged() | GrantsPaused() | SaveAsked() | EnginesAsked():
                self._operator.asked(event)
            case EngineGivenUp():
                self._operator.given_up(event)
            case EngineNoticed():
                noted = EngineNoted(engine=event.engine, engine_epoch=event.engine_epoch, text=event.text)
                self._keeper.note(noted)
            case StopAsked():
                self.run.stop(event.reason)
            case TimerFired():
                self._keeper.out.extend((*self._outbox.settled(is_due=True), *self._outbox.failures()))
            case Started():
                self._on_started()
            case _:
                assert_never(event)
        self._advance()
        return self._keeper.taken()

    def _on_started(self) -> None:
        if self._why_folded:
            self._keeper.notice(f"the Buffer has read its whole ledger to make its books: {self._why_folded}")
        if self.books.identity is None and self.settings.identity is not None:
            self._keeper.note(self.settings.identity)
        self._operator.remind()
        if rows := rows_by_place(self.books):
            self._keeper.note(*rows)
        if self.books.grants.total:  # keepers and PromptSource may know less than the ledger, or nothing
            self._keeper.out.extend((*self._outbox.settled(), *self._outbox.demand()))
        if self.books.evaluations.number:
            self._keeper.out.extend(self._outbox.settled())
            self._evaluation.tell()

    def _on_evaluated(self, group: Group) -> None:
        if story := self._evaluation.came_in(group):
            self.run.fail(story)
        else:
            self.run.finish_if_saved()

    # --- the Learner ------------------------------------------------------------------------------------------

    def _on_learner(self, event: LearnerReady) -> None:
        if event.version < 0:
            self._keeper.send(LEARNER, self.learner.started(event.epoch))
            self.run.learner_lost()
            return
        self._stands_at(event.version)
        if self.run.phase is Phase.FILLING:
            self.run.turn(Phase.RUNNING)

    def _stands_at(self, version: int) -> None:
        if version > self.books.version:
            self.run.fail(f"the Learner stands at version {version}, and the ledger at {self.books.version}")
            return
        self.learner.stands_at(version)

    def _on_step(self, event: StepFinished) -> None:
        books, lease = self.books, self.books.open_lease
        if lease is None or event.version != lease.version:
            if event.version > books.checkpoint_version:  # it was recorded before; the Learner has come to it again
                self._stands_at(event.version)
            return
        if (event.group_ids, event.uses) != (lease.group_ids, lease.uses):
            self.run.fail(f"the receipt of version {event.version} names other groups than its batch")
            return
        again = lease.again
        groups = tuple(books.payload(group_id) for group_id in lease.group_ids if group_id not in again)
        due = books.evaluations.due
        self._keeper.note(
            StepRecorded(
                version=event.version,
                group_ids=event.group_ids,
                num_trained_tokens=event.num_trained_tokens,
                num_masked_tokens=event.num_masked_tokens,
                max_staleness=event.max_staleness,
                uses=event.uses,
            )
        )
        reused = books.used.records(again)
        self.learner.stands_at(event.version)
        self._evaluation.stepped(event.version, due)
        target = self.settings.pacing.target_outstanding or self.target.value
        report = trained_report(books, groups, event, target=target, bound=lease.max_staleness, again=reused)
        self._keeper.send(SUPERVISOR, report)
        self._keeper.expire()
        self.run.stepped()

    def _on_fetched(self, event: BatchFetched) -> None:
        lease = self.books.leases.get(event.version)
        if lease is None or not self.learner.wants(event.version):
            return
        if event.is_gone:
            self.run.fail(f"batch {event.version} is to be trained again, and its samples are no longer in the ledger")
        else:
            self._keeper.send(LEARNER, self.learner.batch(lease, event.groups))

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Offer the next batch if there is one, then grant what may be granted. Idempotent."""
        if self.run.phase in (Phase.ENDED, Phase.STOPPED):
            self.run.finish_again()
            return
        self._repeat()
        is_running = self.run.phase is Phase.RUNNING
        if is_running or self.run.phase is Phase.ENDING:
            self._evaluation.advance()
        if self.run.phase in (Phase.ENDING, Phase.STOPPING):
            return
        if self.books.goal.is_over(self.books, has_learner=is_running):
            self.run.end()
        elif is_running and self.books.announced is not None:
            self._offer()
            self._grant()

    def _repeat(self) -> None:
        """Offer a recorded batch to a Learner that has not trained it."""
        lease = self.learner.to_repeat()
        if lease is None:
            return
        if lease is self.books.open_lease:
            if self.run.phase is Phase.STOPPING:
                return  # the checkpoint is wanted, and not another step before it
            self._send_open(lease)
        else:
            self._keeper.out.append(FetchBatch(lease.version, lease.group_ids))

    def _offer(self) -> None:
        """Form a new batch, if the Learner has trained all that is recorded and one is allowed."""
        books = self.books
        if books.open_lease is not None or not self.learner.is_level or books.evaluations.holds_training:
            return
        lease = books.goal.next_lease(books)
        if lease is None:
            starved = books.table.num_ready < self.settings.groups_per_batch  # more groups do not hasten a late one
            if self.learner.waits and starved and not books.is_paused:
                self.target.learner_waited(bound_of(books))
                self.learner.waits = False
            return
        self._keeper.note(lease)
        if lease.again:  # used groups spared the Learner a wait, which more groups on their way would have as well
            self.target.learner_waited(bound_of(books))
        self.target.batch_taken(books.table.num_ready)
        self.learner.offers(lease.version)
        self._send_open(lease)
        self._keeper.expire()

    def _send_open(self, lease: BatchLeased) -> None:
        """Offer the batch that is out; its payloads are in the table, but those of groups that were trained before."""
        if lease.again:
            self._keeper.out.append(FetchBatch(lease.version, lease.group_ids))
            return
        groups = tuple(map(self.books.payload, lease.group_ids))
        self._keeper.send(LEARNER, self.learner.batch(lease, groups))

    def _grant(self) -> None:
        grants = next_grants(self.books, self.target)
        if grants:
            self._keeper.note(*grants, *rows_again(self.books, grants))
            self._keeper.out.extend(self._outbox.demand())

    def validate(self) -> None:
        """Assert the invariants."""
        self.books.validate()
        self.run.steps.validate()
        if self.policy.on_stale is OnStale.WAIT and self.books.goal.keeps_deadlines:
            late = unfit(self.books.table, self.settings.pacing, taken_at=self.books.taken_at)
            assert not late, f"under wait these can no longer be trained in time: {late}"

    def waits(self) -> tuple[Wait, ...]:
        """The Learner, the first version, groups; see the table above."""
        return tuple(buffer_waits(self.books, self.learner, self.run.phase, is_archived=self.run.is_archived))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What holds for new grants; what it counts is in the ledger, and in the report of each step."""
        return (
            Metric("buffer/max_staleness", self.policy.max_staleness),
            Metric("buffer/grants_paused", float(self.books.is_paused)),
        )
