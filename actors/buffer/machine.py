"""The Buffer: how many groups may start, what a batch is, and what is too old. Only it knows the regime.

Invariants:

* Every group below ``total`` is settled or outstanding, or both; a group is admitted, leased and trained once.
* Grants keep ``outstanding ≤ (s + η + 1 − v)·B``; batches keep the look-ahead rule (``selection.py``). Under ``wait``
  no group ever passes its deadline.
* At most one batch is out: that which makes ``v + 1``. It is offered unchanged until its receipt is recorded.
* Whatever the Buffer says about a group follows the record of it.

States: ``filling`` (no announced version, or no Learner), ``running``, ``ending`` (the last receipt is recorded, the
checkpoint is demanded), ``ended``, ``stopped`` (on demand).

| waits for | who ends it |
|---|---|
| the first ``VersionAnnounced`` | WeightPublisher; its deadlines are those of staging and committing |
| ``LearnerReady`` | the Learner when it has started; the supervisor's start deadline |
| ready groups for a batch | Filter: it admits or rejects every granted group; failed samples travel as samples do |
| the receipt of the open batch | the Learner; its own step deadline |
| ``CheckpointSaved`` at the end | the Learner; the same deadline |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, final

from penstock.actors.buffer.accounts import Accounts, SettledGroups
from penstock.actors.buffer.batching import expired, form_batch, unfit
from penstock.actors.buffer.grants import Grants, groups_of
from penstock.actors.buffer.pacing import AutoTarget, bound, num_grantable
from penstock.actors.buffer.policies import BufferState, builtin_policy, refusal
from penstock.actors.buffer.report import closed_ends, step_report
from penstock.actors.buffer.table import GroupTable, Status, TrackedGroup
from penstock.messages.base import Metric
from penstock.messages.commands import FailRun, Record, Send, StartTimer
from penstock.messages.flow import DemandGranted, GroupAdmitted, GroupRejected, SamplesSettled
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    PolicyRecorded,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.local import Started, TimerFired
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, SUPERVISOR
from penstock.messages.samples import Group, SampleEnd, TerminalState
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointSaved,
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
    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.buffer.settings import BufferSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import BufferEvent
    from penstock.messages.samples import SampleKey
    from penstock.messages.training import StepReported

SETTLE_TIMER = "settle"


@final
class Buffer:
    """The Buffer's state machine."""

    def __init__(self, settings: BufferSettings, policy: StalenessPolicy) -> None:
        self.settings = settings
        self.policy = policy
        self.version = 0
        self.announced: int | None = None
        self.table = GroupTable()
        self.settled = SettledGroups()
        self.accounts = Accounts(settings.samples_per_group)
        self.grants = Grants(num_prompts=settings.num_prompts, max_requeues=settings.max_requeues)
        self.target = AutoTarget.of(settings.pacing)
        self.open_batch: BatchReady | None = None
        self.max_staleness_seen = 0
        self._learner_ready = False
        self._learner_waits = False
        self._num_trained = 0
        self._checkpoint_version = -1
        """Of the newest recorded checkpoint."""
        self._num_rejected_since_batch = 0
        self._phase = "filling"
        self._settle_due = False
        self._untold: list[tuple[SampleKey, ...]] = []
        """Samples of the groups that came in since settlements were last told."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people: the phase, or what the Learner waits for."""
        return self._phase

    def leases(self) -> tuple[HeldLease, ...]:
        """What came in since settlements were last told: those who sent it may have died, and nobody else knows yet."""
        return tuple(HeldLease(key, 0, LeaseStage.PASSED_ON) for keys in self._untold for key in keys)

    def handle(self, event: BufferEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case GroupAdmitted():
                self._on_admitted(event.group)
            case GroupRejected():
                self._on_rejected(event)
            case VersionAnnounced():
                self._on_announced(event.version)
            case StepFinished():
                self._on_step(event)
            case LearnerReady():
                self._learner_ready = self._learner_waits = True
                self._phase = "running" if self._phase == "filling" else self._phase
            case CheckpointSaved():
                self._on_checkpoint(event)
            case PolicyChanged():
                self._on_policy(event)
            case StopAsked():
                self._on_stop(event.reason)
            case TimerFired():
                self._settle_due = False
                self._tell_settled()
            case Started():
                pass
            case _:
                assert_never(event)
        self._advance()
        out, self._out = self._out, []
        return out

    # --- groups come in ---------------------------------------------------------------------------------------

    def _on_admitted(self, group: Group) -> None:
        tracked = self.table.get(group.group_id)
        if tracked is None or tracked.status is not Status.GRANTED:
            return
        oldest = group.oldest_version
        if oldest is not None and oldest < tracked.min_version:
            self._fail(
                f"group {group.group_id} has a token of version {oldest}, it was granted for {tracked.min_version}"
            )
            return
        deadline = tracked.deadline if oldest is None else max(tracked.deadline, oldest + tracked.max_staleness)
        self.table.admit(group, deadline)
        self.settled.add(group.group_id)
        self._out.append(Record((GroupRecorded(group=group, deadline_version=deadline),)))
        self._untold.append(tuple(sample.key for sample in group.samples))
        self._settle_soon()
        if self.policy.on_stale is OnStale.MASK:
            self._expire()  # it may be old throughout; what else expires does so with the version

    def _on_rejected(self, event: GroupRejected) -> None:
        tracked = self.table.get(event.group_id)
        if tracked is None or tracked.status is not Status.GRANTED:
            return
        self._close(tracked, event.ended)
        came = (end for end in event.ended if end.state is not TerminalState.CANCELLED)
        self._untold.append(tuple(end.key for end in came))
        self.grants.ended(tracked.ordinal)
        self._num_rejected_since_batch += 1
        limit = self.settings.max_rejected_batches * self.settings.groups_per_batch
        if self._num_rejected_since_batch >= limit and self._phase == "running":
            self._fail(
                f"{self._num_rejected_since_batch} groups in a row were turned away without one batch (the last: "
                f"{event.cause}). The task may be too hard or too easy for this model, or the filter too strict: "
                f"look at filter.* and at the rewards, or raise staleness.max_rejected_batches"
            )

    # --- versions, receipts, ends -----------------------------------------------------------------------------

    def _on_announced(self, version: int) -> None:
        if self.announced is None or version > self.announced:
            self.announced = version
            self._out.append(Record((VersionRecorded(version=version),)))

    def _on_step(self, event: StepFinished) -> None:
        batch = self.open_batch
        if batch is None or event.version != batch.version:
            return  # a receipt that is recorded already
        group_ids = tuple(group.group_id for group in batch.groups)
        if event.group_ids != group_ids:
            self._fail(f"the receipt of version {event.version} names other groups than its batch")
            return
        self._out.append(
            Record(
                (
                    StepRecorded(
                        version=event.version,
                        group_ids=group_ids,
                        num_trained_tokens=event.num_trained_tokens,
                        max_staleness=event.max_staleness,
                    ),
                )
            )
        )
        for group in batch.groups:
            self.grants.ended(self.table.remove(group.group_id).ordinal)
            self.accounts.trained(group.samples, group.ended)
        self.version, self.open_batch, self._learner_waits = event.version, None, True
        self._num_trained += len(group_ids)
        self.max_staleness_seen = max(self.max_staleness_seen, event.max_staleness)
        self._out.append(Send(SUPERVISOR, self._report(batch, event)))
        self._expire()
        if batch.is_last:
            self._end()

    def _report(self, batch: BatchReady, receipt: StepFinished) -> StepReported:
        gauges = (
            Metric("buffer/ready_groups", self.table.num_ready),
            Metric("buffer/outstanding_groups", self.table.num_outstanding),
            Metric("buffer/target_outstanding", self.settings.pacing.target_outstanding or self.target.value),
            Metric("buffer/announced_lag", receipt.version - (self.announced or 0)),
        )
        return step_report(batch, receipt, gauges, num_steps=self.settings.num_steps, balance=self.accounts.balance())

    def _ends(self, tracked: TrackedGroup, state: TerminalState, cause: str) -> tuple[SampleEnd, ...]:
        return closed_ends(tracked, state, cause, samples_per_group=self.settings.samples_per_group)

    def _end(self) -> None:
        """The last receipt is recorded: close what is left over and ask for the last checkpoint."""
        self._phase = "ending"
        for tracked in list(self.table.outstanding()):
            self._close(tracked, self._ends(tracked, TerminalState.CANCELLED, "run_end"))
        self._tell_settled()
        self._out.append(Send(LEARNER, CheckpointDemanded(version=self.version)))

    def _on_checkpoint(self, event: CheckpointSaved) -> None:
        if event.version > self.version:
            return  # ahead of its receipt: it is demanded when that is recorded
        if event.version > self._checkpoint_version:
            self._checkpoint_version = event.version
            self._out.append(Record((CheckpointRecorded(version=event.version, path=event.path),)))
        if self._phase == "ending" and event.version == self.version:
            self._phase = "ended"
            story = f"{self.version} batches trained"
            if self.version < self.settings.num_steps:
                story += f" of {self.settings.num_steps}: the dataset ended"
            self._finish(story, completed=True, checkpoint=event.path)

    def _on_stop(self, reason: str) -> None:
        if self._phase not in ("ended", "stopped"):
            self._phase = "stopped"
            self._finish(reason, completed=False, checkpoint="")

    def _finish(self, story: str, *, completed: bool, checkpoint: str) -> None:
        finished = RunFinished(
            completed=completed,
            story=story,
            version=self.version,
            max_staleness=self.max_staleness_seen,
            balance=self.accounts.balance(),
            checkpoint=checkpoint,
        )
        self._out.append(Send(SUPERVISOR, finished))

    def _fail(self, story: str) -> None:
        self._phase = "stopped"
        self._finish(story, completed=False, checkpoint="")
        self._out.append(FailRun(story))

    def _on_policy(self, event: PolicyChanged) -> None:
        reason = refusal(event, publish_every=self.settings.publish_every)
        if reason:
            self._notice(f"the policy stays as it is: {reason}")
            return
        if event.on_stale is OnStale.WAIT and self.policy.on_stale is not OnStale.WAIT:
            # The old policy took batches without looking ahead; what it left over could make the new one wait for ever.
            for tracked in unfit(self.table, self.settings.pacing, taken_at=self._taken_at):
                self._close(tracked, self._ends(tracked, TerminalState.STALE, "past_deadline"))
        self.policy = builtin_policy(
            event.policy, max_staleness=event.max_staleness, update_mode=event.update_mode, on_stale=event.on_stale
        )
        recorded = PolicyRecorded(
            policy=event.policy,
            max_staleness=event.max_staleness,
            update_mode=event.update_mode,
            on_stale=event.on_stale,
        )
        self._out.append(Record((recorded,)))
        self._notice(f"new grants follow {event.policy} with max_staleness {event.max_staleness}")

    def _notice(self, text: str) -> None:
        self._out.append(Send(SUPERVISOR, NoticeGiven(name=BUFFER, text=text)))

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Form a batch if one is allowed, then grant what may be granted. Idempotent."""
        if self._phase != "running" or self.announced is None:
            return
        self._offer()
        self._grant()
        if self._is_exhausted() and self.table.num_outstanding == 0:
            self._end()

    def _offer(self) -> None:
        if self.open_batch is not None or not self._learner_ready:
            return
        pacing = self.settings.pacing
        batch = form_batch(self.table, self.policy, pacing, version=self.version, is_exhausted=self._is_exhausted())
        if batch is None:
            starved = self.table.num_ready < self.settings.groups_per_batch  # more groups do not hasten a late one
            if self._learner_waits and starved:
                self.target.learner_waited(self._bound())
                self._learner_waits = False
            return
        groups = self.table.lease(batch)
        self._learner_waits, self._num_rejected_since_batch = False, 0
        self.target.batch_taken(self.table.num_ready)
        is_last = self.version + 1 == self.settings.num_steps or (self._is_exhausted() and not self.table.num_unleased)
        self.open_batch = BatchReady(
            version=self.version + 1,
            groups=groups,
            announced_version=self.announced or 0,
            max_staleness=max(self.table.tracked(group.group_id).max_staleness for group in groups),
            mask_stale=self.policy.on_stale is OnStale.MASK,
            update_mode=self.policy.update_mode,
            is_last=is_last,
            num_waiting_groups=self.table.num_ready,
        )
        self._out.append(Record((BatchLeased(version=self.version + 1, group_ids=tuple(batch)),)))
        self._out.append(Send(LEARNER, self.open_batch))
        self._expire()

    def _is_exhausted(self) -> bool:
        """The dataset has nothing left to grant."""
        return self.grants.num_left == 0

    @property
    def _taken_at(self) -> int:
        """The version at which the next batch is taken."""
        return self.version + (self.open_batch is not None)

    def _bound(self) -> int:
        return bound(
            announced=self.announced or 0,
            taken_at=self._taken_at,
            num_leased=self.table.num_leased,
            max_staleness=self.policy.max_staleness,
            settings=self.settings.pacing,
        )

    def _limit(self) -> int:
        """How many groups may be outstanding: the policy's target, cut at the bound, never below one batch."""
        pacing = self.settings.pacing
        view = BufferState(
            version=self.version,
            announced_version=self.announced or 0,
            groups_per_batch=pacing.groups_per_batch,
            outstanding=self.table.num_outstanding,
            ready=self.table.num_ready,
            target_outstanding=pacing.target_outstanding or self.target.value,
        )
        wanted = max(self.policy.target(view), pacing.groups_per_batch)
        return min(int(wanted * pacing.over_sampling), self._bound())

    def _grant(self) -> None:
        number = num_grantable(
            limit=self._limit(),
            outstanding=self.table.num_outstanding,
            in_generation=self.table.num_in_generation,
            trained=self._num_trained,
            num_left=self.grants.num_left,
            settings=self.settings.pacing,
        )
        if number == 0 or self.announced is None:
            return
        eta = self.policy.max_staleness
        spans = self.grants.grant(number, min_version=self.announced, deadline_version=self.announced + eta)
        for span in spans:
            for group_id, ordinal in groups_of(span):
                self.table.grant(TrackedGroup(group_id, ordinal, self.announced, self.announced + eta, eta))
        self.accounts.granted(number)
        self._out.append(Record(tuple(GroupsGranted(span=span, total=self.grants.total) for span in spans)))
        self._tell_demand()

    def _expire(self) -> None:
        """End the groups that can no longer be trained in time."""
        expiry, found = expired(
            self.table,
            self.policy,
            self.settings.pacing,
            version=self.version,
            taken_at=self._taken_at,
        )
        for tracked in found:
            if expiry.is_requeued:
                self.grants.requeue(tracked.ordinal)
            self._close(tracked, self._ends(tracked, expiry.state, expiry.cause))

    def _close(self, tracked: TrackedGroup, ended: tuple[SampleEnd, ...]) -> None:
        """Every sample of the group is terminal, and not by training."""
        self.table.remove(tracked.group_id)
        self.accounts.closed(ended)
        self._out.append(Record((GroupClosed(group_id=tracked.group_id, ended=ended),)))
        if tracked.group_id not in self.settled:
            self.settled.add(tracked.group_id)
        self._settle_soon()

    # --- telling ----------------------------------------------------------------------------------------------

    def _settle_soon(self) -> None:
        if not self._settle_due:
            self._settle_due = True
            self._out.append(StartTimer(SETTLE_TIMER, self.settings.settle_delay_s))

    def _tell_settled(self) -> None:
        self._untold = []
        event = SamplesSettled(settled=self.settled.snapshot())
        keepers = (PROMPT_SOURCE, SCORER, FILTER, *self.settings.engines)
        self._out.extend(Send(keeper, event) for keeper in keepers)

    def _tell_demand(self) -> None:
        self._untold = []
        snapshot = self.settled.snapshot()
        spans = self.grants.snapshot(snapshot.floor)
        self._out.append(Send(PROMPT_SOURCE, DemandGranted(total=self.grants.total, spans=spans, settled=snapshot)))

    def validate(self) -> None:
        """Assert the invariants."""
        self.table.validate()
        self.settled.validate()
        balance = self.accounts.balance()
        assert balance.is_balanced, f"the accounts do not balance: {balance}"
        assert self.accounts.num_open_groups == self.table.num_outstanding
        if self.policy.on_stale is OnStale.WAIT:
            late = unfit(self.table, self.settings.pacing, taken_at=self._taken_at)
            assert not late, f"under wait these can no longer be trained in time: {late}"
