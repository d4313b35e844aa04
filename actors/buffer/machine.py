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

States: ``filling`` (no announced version, or no Learner), ``running``, ``ending`` (the last receipt is recorded, the
checkpoint is demanded, the last samples are archived), ``stopping`` (the same, on demand), ``ended``, ``stopped``.

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

from penstock.actors.buffer.batching import unfit
from penstock.actors.buffer.books import Books, recorded
from penstock.actors.buffer.collecting import collected_ids, collected_report, is_collected
from penstock.actors.buffer.decisions import (
    bound_of,
    closing,
    expiring,
    is_kept,
    next_grants,
    next_lease,
    rows_again,
    rows_by_place,
)
from penstock.actors.buffer.failures import EarlyFailures
from penstock.actors.buffer.learner_side import LearnerSide
from penstock.actors.buffer.pacing import AutoTarget
from penstock.actors.buffer.policies import refusal
from penstock.actors.buffer.report import step_report
from penstock.actors.buffer.table import Status
from penstock.actors.buffer.telling import Telling
from penstock.actors.buffer.waiting import buffer_waits
from penstock.messages.base import Metric
from penstock.messages.commands import ArchiveGroups, ArchiveSamples, FailRun, FetchBatch, KeepAnswers, Record, Send
from penstock.messages.evaluation import EvaluationOpened, PublishDemanded
from penstock.messages.flow import FailuresTold, GroupAdmitted, GroupRejected, RowsChosen
from penstock.messages.ledger import (
    CheckpointRecorded,
    FailuresNoted,
    GroupClosed,
    PayloadsReleased,
    PolicyRecorded,
    RowsRecorded,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.local import BatchFetched, SamplesArchived, Started, TimerFired
from penstock.messages.names import BUFFER, LEARNER, SUPERVISOR
from penstock.messages.samples import Group, TerminalState, group_name, is_evaluation
from penstock.messages.training import (
    CheckpointDemanded,
    CheckpointSaved,
    CheckpointsKept,
    FailuresCounted,
    LearnerReady,
    NoticeGiven,
    OnStale,
    PolicyChanged,
    RunFinished,
    StepFinished,
    StopAsked,
)
from penstock.messages.weights import VersionAnnounced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.buffer.settings import BufferSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import BufferEvent
    from penstock.messages.ledger import BatchLeased, LedgerEntry
    from penstock.messages.membership import HeldLease
    from penstock.messages.training import StepReported
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
    ) -> None:
        """
        Args:
            settings: of the run.
            policy: that of the scenario; a recorded change of policy takes its place.
            records: the ledger of the run so far, oldest first.
            row_of: row and epoch of a place in the stream of prompts, where rows are chosen.

        Raises:
            OtherRunError: the ledger is that of another run.
        """
        self.settings = settings
        self.books = Books(settings, policy, row_of)
        for entry in records:
            self.books.apply(entry)
        self.books.check_evaluation()
        self._demanded_publish = -1
        """Version that the Learner was last asked to publish."""
        self.target = AutoTarget.of(settings.pacing)
        self.learner = LearnerSide(self.books)
        self._early = EarlyFailures(settings.stop_after_failures)
        self._num_failures_told = 0
        self._phase = "filling"
        self._stop_reason = ""
        self._archived_through = self.books.released_through
        self._is_archiving = False
        self._telling = Telling(self.books)
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people: the phase, or what is done again."""
        if self._phase == "running" and self.learner.stand is not None and not self.learner.is_level:
            return f"batch {self.learner.stand + 1} of {self.books.version} again"
        return self._phase

    @property
    def version(self) -> int:
        """Batches trained and recorded."""
        return self.books.version

    @property
    def policy(self) -> StalenessPolicy:
        """Which new grants follow."""
        return self.books.policy

    def leases(self) -> tuple[HeldLease, ...]:
        """What came in since settlements were last told."""
        return self._telling.leases()

    def handle(self, event: BufferEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case GroupAdmitted():
                if is_evaluation(event.group.group_id):
                    self._on_evaluated(event.group)
                else:
                    self._on_admitted(event.group)
            case GroupRejected():
                self._on_rejected(event)
            case FailuresTold():
                self._on_failures(event)
            case RowsChosen():
                self._on_rows(event)
            case VersionAnnounced():
                if self.books.announced is None or event.version > self.books.announced:
                    self._note(VersionRecorded(version=event.version))
            case StepFinished():
                self._on_step(event)
            case LearnerReady():
                self._on_learner(event)
            case BatchFetched():
                self._on_fetched(event)
            case CheckpointSaved():
                self._on_checkpoint(event)
            case SamplesArchived():
                self._on_archived(event.last_version)
            case PolicyChanged():
                self._on_policy(event)
            case StopAsked():
                self._on_stop(event.reason)
            case TimerFired():
                self._out.extend(self._telling.settled(is_due=True))
                self._tell_failures()
            case Started():
                self._on_started()
            case _:
                assert_never(event)
        self._advance()
        out, self._out = self._out, []
        return out

    def _note(self, *entries: LedgerEntry) -> None:
        """Enter these in the books and in the ledger."""
        for entry in entries:
            self.books.apply(entry)
        self._out.append(Record(entries))

    def _on_started(self) -> None:
        if self.books.identity is None and self.settings.identity is not None:
            self._note(self.settings.identity)
        if rows := rows_by_place(self.books):
            self._note(*rows)
        if self.books.grants.total:  # keepers and PromptSource may know less than the ledger, or nothing
            self._out.extend((*self._telling.settled(), *self._telling.demand()))
        if self.books.evaluations.number:
            self._out.extend((*self._telling.settled(), *self._telling.evaluation()))
            self._tell_finished()

    # --- groups come in ---------------------------------------------------------------------------------------

    def _on_admitted(self, group: Group, kept_cause: str = "") -> None:
        tracked = self.books.table.get(group.group_id)
        if tracked is None or tracked.status is not Status.GRANTED:
            return
        oldest = group.oldest_version
        if oldest is not None and oldest < tracked.min_version:
            self._fail(
                f"group {group.group_id} has a token of version {oldest}, it was granted for {tracked.min_version}"
            )
            return
        deadline = tracked.deadline if oldest is None else max(tracked.deadline, oldest + tracked.max_staleness)
        self._note(recorded(group, deadline, kept_cause))
        self._telling.came_in(sample.key for sample in group.samples)
        self._out.extend(self._telling.soon())
        if self.settings.collects is not None and (report := collected_report(self.books)) is not None:
            self._out.append(Send(SUPERVISOR, report))
        if self.policy.on_stale is OnStale.MASK:
            self._expire()  # it may be old throughout; what else expires does so with the version

    def _on_rejected(self, event: GroupRejected) -> None:
        tracked = self.books.table.get(event.group_id)
        if tracked is None or tracked.status is not Status.GRANTED:
            return
        if event.group is not None and is_kept(self.books, event):
            self._on_admitted(event.group, event.cause)
            return
        self._close(
            GroupClosed(
                group_id=event.group_id,
                ended=event.ended,
                rejected_cause=event.cause,
                mean_reward=event.mean_reward,
            )
        )
        self._telling.came_in(end.key for end in event.ended if end.state is not TerminalState.CANCELLED)
        num_rejected = self.books.rejections.num_since_batch
        limit = self.settings.max_rejected_batches * self.settings.groups_per_batch
        if num_rejected >= limit and self._phase == "running":
            advice = "The task may be too hard or too easy for this model, or the filter too strict: look at filter.*"
            if any(end.reason for end in event.ended):
                advice = f"{self.books.failures.told()}. Mend that, or look"
            self._fail(
                f"{num_rejected} groups in a row were turned away without one batch (the last: {event.cause}). "
                f"{advice} and at the rewards, or raise staleness.max_rejected_batches"
            )

    def _on_failures(self, event: FailuresTold) -> None:
        """Note what is news of groups that have not come in, and end a run in which everything fails."""
        failures = self.books.failures
        ends = failures.news(end for end in event.ends if self.books.awaits(end.key.group_id))
        if not ends:
            return
        self._note(FailuresNoted(ends=ends))
        self._out.extend(self._telling.soon())
        trained = [end for end in ends if not is_evaluation(end.key.group_id)]
        story = self._early.hear(trained, has_scored=failures.has_scored or event.has_scored)
        if story and self._phase in ("filling", "running"):
            self._fail(story)

    def _tell_failures(self) -> None:
        failures = self.books.failures
        if failures.num_samples != self._num_failures_told:
            self._num_failures_told = failures.num_samples
            counted = FailuresCounted(counts=failures.counts(), num_samples=failures.num_samples)
            self._out.append(Send(SUPERVISOR, counted))

    def _on_rows(self, event: RowsChosen) -> None:
        """Record what is new, and say everything again: PromptSource issues what comes back to it."""
        is_behind = event.num_outcomes != self._telling.num_known_outcomes
        self._telling.num_known_outcomes = min(event.num_outcomes, len(self.books.history))
        new = tuple(
            row
            for row in event.rows
            if (tracked := self.books.table.get(row.group_id)) is not None
            and tracked.status is Status.GRANTED
            and tracked.row is None
        )
        if new:
            self._note(RowsRecorded(rows=new))
        if new or is_behind or not event.rows:
            self._out.extend(self._telling.demand())

    # --- evaluation -------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Open the evaluation that is due, if engines serve its version; otherwise see to it that they will."""
        evaluations, announced = self.books.evaluations, self.books.announced
        due = evaluations.due
        if due is None or (announced is not None and announced >= due and evaluations.open is not None):
            return
        if announced is not None and announced >= due:
            self._note(EvaluationOpened(evaluation=evaluations.next(self.policy.max_staleness)))
            self._out.extend(self._telling.evaluation())
        else:
            self._demand_publish(due)

    def _demand_publish(self, version: int) -> None:
        if self._demanded_publish < version:
            self._demanded_publish = version
            self._out.append(Send(LEARNER, PublishDemanded(version=version)))

    def _on_evaluated(self, group: Group) -> None:
        evaluations = self.books.evaluations
        if not evaluations.waits_for(group.group_id):
            return
        open_one, oldest = evaluations.open, group.oldest_version
        assert open_one is not None
        if oldest is not None and oldest < open_one.version:
            name = group_name(group.group_id)
            self._fail(f"group {name} has a token of version {oldest}, the evaluation is of {open_one.version}")
            return
        entry = evaluations.entry_of(group)
        self._note(entry)
        name = open_one.datasets[entry.dataset].name
        answers = KeepAnswers(evaluation=open_one.number, version=open_one.version, dataset=name, group=group)
        self._out.append(answers)
        self._telling.came_in((*(sample.key for sample in group.samples), *(end.key for end in group.ended)))
        self._out.extend(self._telling.soon())
        if evaluations.open is None:
            self._out.extend(self._telling.evaluation())
            self._tell_finished()
            self._finish_if_saved()

    def _note_left_out(self, version: int) -> None:
        self._notice(f"version {version} is not evaluated: evaluations are due more often than they can be made")

    def _tell_finished(self) -> None:
        finished = self.books.evaluations.finished
        if finished is not None:
            self._out.append(Send(SUPERVISOR, finished))

    # --- the Learner ------------------------------------------------------------------------------------------

    def _on_learner(self, event: LearnerReady) -> None:
        if event.version < 0:
            self._out.append(Send(LEARNER, self.learner.started(event.epoch)))
            if self._phase == "stopping":
                self._stopped(self._stop_reason)  # what was to be saved is gone; it is trained again on resumption
            return
        self._stands_at(event.version)
        if self._phase == "filling":
            self._phase = "running"

    def _stands_at(self, version: int) -> None:
        if version > self.books.version:
            self._fail(f"the Learner stands at version {version}, and the ledger at {self.books.version}")
            return
        self.learner.stands_at(version)

    def _on_step(self, event: StepFinished) -> None:
        books, lease = self.books, self.books.open_lease
        if lease is None or event.version != lease.version:
            if event.version > books.checkpoint_version:  # it was recorded before; the Learner has come to it again
                self._stands_at(event.version)
            return
        if event.group_ids != lease.group_ids:
            self._fail(f"the receipt of version {event.version} names other groups than its batch")
            return
        groups = tuple(map(books.payload, lease.group_ids))
        due = books.evaluations.due
        self._note(
            StepRecorded(
                version=event.version,
                group_ids=event.group_ids,
                num_trained_tokens=event.num_trained_tokens,
                num_masked_tokens=event.num_masked_tokens,
                max_staleness=event.max_staleness,
            )
        )
        self.learner.stands_at(event.version)
        if due is not None and books.evaluations.is_wanted(event.version):
            self._note_left_out(due if books.evaluations.due != due else event.version)
        self._out.append(Send(SUPERVISOR, self._report(groups, event)))
        self._expire()

    def _report(self, groups: tuple[Group, ...], receipt: StepFinished) -> StepReported:
        table = self.books.table
        gauges: tuple[Metric, ...] = (
            Metric("buffer/ready_groups", table.num_ready),
            Metric("buffer/outstanding_groups", table.num_outstanding),
            Metric("buffer/target_outstanding", self.settings.pacing.target_outstanding or self.target.value),
            Metric("buffer/announced_lag", receipt.version - (self.books.announced or 0)),
        )
        gauges += self.books.rejections.metrics()
        balance = self.books.accounts.balance()
        return step_report(
            groups,
            receipt,
            gauges,
            num_steps=self.books.num_steps,
            balance=balance,
            masks_old=self.settings.mask_old_tokens,
        )

    def _on_fetched(self, event: BatchFetched) -> None:
        lease = self.books.leases.get(event.version)
        if lease is None or not self.learner.wants(event.version):
            return
        if event.is_gone:
            self._fail(f"batch {event.version} is to be trained again, and its samples are no longer in the ledger")
        else:
            self._out.append(Send(LEARNER, self.learner.batch(lease, event.groups)))

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _on_checkpoint(self, event: CheckpointSaved) -> None:
        books = self.books
        if event.version > books.version:
            return  # ahead of its receipt; the last one is demanded when that is recorded
        if event.version > books.checkpoint_version:
            self._note(CheckpointRecorded(version=event.version, path=event.path))
            if self.learner.stand is not None and self.learner.stand < event.version:
                self.learner.stands_at(event.version)
            self._release()
        self._finish_if_saved()

    @property
    def _is_archived(self) -> bool:
        """Whether no samples are left to be written to a file."""
        if self.settings.collects is not None:
            return self._phase != "ending"
        return not self.settings.keep_samples or self._archived_through >= self.books.checkpoint_version

    def _release(self) -> None:
        """Let go of what no checkpoint that is kept needs, once it is archived if it is to be."""
        books = self.books
        if self.settings.collects is None and not self._is_archived:
            if not self._is_archiving:  # or two cover the same steps, and the first one's end releases what both read
                self._is_archiving = True
                self._out.append(ArchiveSamples(self._archived_through + 1, books.checkpoint_version))
            return
        oldest = books.checkpoints[0].version
        if oldest > books.released_through:
            self._note(PayloadsReleased(through_version=oldest))
        self._out.append(Send(LEARNER, CheckpointsKept(oldest_version=oldest)))

    def _on_archived(self, last_version: int) -> None:
        if self.settings.collects is not None:
            self._phase = "ended"
            story = f"{self.books.table.num_ready} groups collected of {self.settings.collects}"
            self._finish(story, completed=True)
            return
        self._is_archiving = False
        self._archived_through = max(self._archived_through, last_version)
        if self.books.checkpoints:
            self._release()
        self._finish_if_saved()

    def _finish_if_saved(self) -> None:
        """End the run, or the stop, when the checkpoint of all that is trained is recorded, and the run not before its
        last evaluation is done."""
        books = self.books
        if self._phase == "ending" and books.evaluations.is_busy:
            return
        if self._phase == "ending" and self.settings.collects == 0:
            self._phase = "ended"
            self._finish(f"{books.evaluations.number} evaluations made", completed=True)
            return
        if self._phase not in ("ending", "stopping") or books.checkpoint_version < books.version:
            return
        if not self._is_archived:
            return
        if self._phase == "stopping":
            self._stopped(self._stop_reason)
            return
        self._phase = "ended"
        story = f"{self.version} batches trained"
        if self.version < self.settings.num_steps:
            story += f" of {self.settings.num_steps}: "
            story += "the dataset ended" if self.books.fixed is None else "no more were recorded"
        self._finish(story, completed=True)

    # --- ends -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The last receipt is recorded: close what is left over and ask for the last checkpoint."""
        self._phase = "ending"
        due = self.books.evaluations.due
        self.books.evaluations.end(self.version)
        if due is not None and due != self.books.evaluations.due:
            self._note_left_out(due)
        self._evaluate()
        if self.books.evaluations.is_busy:  # engines that sleep, or came anew, get weights by no further step
            self._demand_publish(self.version)
        if self.settings.collects == 0:
            self._finish_if_saved()
            return
        if self.settings.collects is not None:
            self._out.extend(self._telling.settled())
            self._out.append(ArchiveGroups(collected_ids(self.books)))
            return
        for tracked in list(self.books.table.outstanding()):
            self._close(closing(self.books, tracked, TerminalState.CANCELLED, "run_end"))
        self._out.extend(self._telling.settled())
        self._demand_checkpoint()

    def _demand_checkpoint(self) -> None:
        if self.books.checkpoint_version == self.version:
            self._release()
            self._finish_if_saved()
        else:
            self._out.append(Send(LEARNER, CheckpointDemanded(version=self.version)))

    def _on_stop(self, reason: str) -> None:
        """Save what is trained, if that can be done now. A Learner that is still behind has nothing to add."""
        if self._phase == "ending" and self.books.evaluations.is_busy:
            self._stop_evaluating(reason)
            return
        if self._phase in ("ending", "ended", "stopped", "stopping"):
            return  # it ends anyway
        if self._phase == "filling" or not self.learner.is_level:
            self._stopped(reason)
            return
        self._phase, self._stop_reason = "stopping", reason
        if self.books.open_lease is not None or max(0, self.books.checkpoint_version) < self.version:
            self._out.append(Send(LEARNER, CheckpointDemanded(version=self.version)))
        else:
            self._stopped(reason)

    def _stop_evaluating(self, reason: str) -> None:
        """All is trained; what is left of the last evaluation is made when the run is resumed."""
        self._phase, self._stop_reason = "stopping", reason
        if self.settings.collects == 0:
            self._stopped(reason)
        else:
            self._finish_if_saved()

    def _stopped(self, reason: str) -> None:
        self._phase = "stopped"
        self._finish(reason, completed=False)

    def _finish(self, story: str, *, completed: bool) -> None:
        books = self.books
        self._tell_failures()
        finished = RunFinished(
            completed=completed,
            story=story,
            version=books.version,
            max_staleness=books.max_staleness_seen,
            balance=books.accounts.balance(),
            checkpoint=books.checkpoints[-1].path if books.checkpoints else "",
        )
        self._out.append(Send(SUPERVISOR, finished))

    def _fail(self, story: str) -> None:
        self._stopped(story)
        self._out.append(FailRun(story))

    # --- the policy -------------------------------------------------------------------------------------------

    def _on_policy(self, event: PolicyChanged) -> None:
        reason = refusal(event, publish_every=self.settings.publish_every)
        if reason:
            self._notice(f"the policy stays as it is: {reason}")
            return
        if event.on_stale is OnStale.WAIT and self.policy.on_stale is not OnStale.WAIT:
            # The old policy took batches without looking ahead; what it left over could make the new one wait for ever.
            for tracked in unfit(self.books.table, self.settings.pacing, taken_at=self.books.taken_at):
                self._close(closing(self.books, tracked, TerminalState.STALE, "past_deadline"))
        self._note(
            PolicyRecorded(
                policy=event.policy,
                max_staleness=event.max_staleness,
                update_mode=event.update_mode,
                on_stale=event.on_stale,
            )
        )
        self._notice(f"new grants follow {event.policy} with max_staleness {event.max_staleness}")

    def _notice(self, text: str) -> None:
        self._out.append(Send(SUPERVISOR, NoticeGiven(name=BUFFER, text=text)))

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Offer the next batch if there is one, then grant what may be granted. Idempotent."""
        if self._phase not in ("filling", "running", "ending", "stopping"):
            return
        self._repeat()
        if self._phase in ("running", "ending"):
            self._evaluate()
        if self._phase in ("ending", "stopping"):
            return
        if self._is_over():
            self._end()
            self._repeat()
        elif self._phase == "running" and self.books.announced is not None:
            if self.settings.collects is None:
                self._offer()
            self._grant()

    def _is_over(self) -> bool:
        """Whether nothing more can be trained, or everything is collected."""
        books = self.books
        if self.settings.collects is not None:
            return self._phase == "running" and is_collected(books)
        if books.open_lease is not None:
            return False  # a recorded batch is trained, also when num_steps was lowered since
        return books.version >= books.num_steps or (books.is_exhausted and not books.table.num_outstanding)

    def _repeat(self) -> None:
        """Offer a recorded batch to a Learner that has not trained it."""
        lease = self.learner.to_repeat()
        if lease is None:
            return
        if lease is self.books.open_lease:
            if self._phase == "stopping":
                return  # the checkpoint is wanted, and not another step before it
            self._send_open(lease)
        else:
            self._out.append(FetchBatch(lease.version, lease.group_ids))

    def _offer(self) -> None:
        """Form a new batch, if the Learner has trained all that is recorded and one is allowed."""
        books = self.books
        if books.open_lease is not None or not self.learner.is_level or books.evaluations.holds_training:
            return
        lease = next_lease(books)
        if lease is None:
            starved = books.table.num_ready < self.settings.groups_per_batch  # more groups do not hasten a late one
            if self.learner.waits and starved:
                self.target.learner_waited(bound_of(books))
                self.learner.waits = False
            return
        self._note(lease)
        self.target.batch_taken(books.table.num_ready)
        self.learner.offers(lease.version)
        self._send_open(lease)
        self._expire()

    def _send_open(self, lease: BatchLeased) -> None:
        """Offer the batch that is out; its payloads are in the table."""
        groups = tuple(map(self.books.payload, lease.group_ids))
        self._out.append(Send(LEARNER, self.learner.batch(lease, groups)))

    def _grant(self) -> None:
        grants = next_grants(self.books, self.target)
        if grants:
            self._note(*grants, *rows_again(self.books, grants))
            self._out.extend(self._telling.demand())

    def _expire(self) -> None:
        """End the groups that can no longer be trained in time."""
        for entry in expiring(self.books):
            self._close(entry)

    def _close(self, entry: GroupClosed) -> None:
        """Every sample of the group is terminal, and not by training."""
        self._note(entry)
        self._out.extend(self._telling.soon())

    def validate(self) -> None:
        """Assert the invariants."""
        self.books.validate()
        if self.policy.on_stale is OnStale.WAIT and self.books.fixed is None:
            late = unfit(self.books.table, self.settings.pacing, taken_at=self.books.taken_at)
            assert not late, f"under wait these can no longer be trained in time: {late}"

    def waits(self) -> tuple[Wait, ...]:
        """The Learner, the first version, groups; see the table above."""
        return tuple(buffer_waits(self.books, self.learner, self._phase, is_archived=self._is_archived))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: what it counts is in the ledger, and in the report of each step."""
        return ()
