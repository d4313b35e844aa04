"""The books of the run: everything that the Buffer knows for good, as the fold of the ledger's entries.

Invariants:

* ``apply`` is the only way in which the books change, and every entry that is applied is recorded. So a Buffer that
  applies the entries of its predecessor stands where that one stood, whatever had been done with the last of them.
* Every group below ``grants.total`` is settled or in the table, or both.
* At most one batch is leased and not trained: that which makes ``version + 1``.
* ``leases`` holds every batch after the newest checkpoint: those that a Learner which comes back trains again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from penstock.actors.buffer.accounts import Accounts, SettledGroups, made_tokens
from penstock.actors.buffer.evaluating import Evaluations
from penstock.actors.buffer.failures import Failures
from penstock.actors.buffer.goals import Replay
from penstock.actors.buffer.grants import Grants, groups_of
from penstock.actors.buffer.histories import Rejections, RowHistory
from penstock.actors.buffer.policies import builtin_policy
from penstock.actors.buffer.reuse import UsedGroups
from penstock.actors.buffer.table import GroupTable, Status, TrackedGroup
from penstock.messages.errors import UserFault
from penstock.messages.evaluation import EvaluationOpened, GroupEvaluated
from penstock.messages.ledger import (
    BatchesFixed,
    BatchLeased,
    CheckpointRecorded,
    EngineNoted,
    EnginesRecorded,
    FailuresNoted,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    PauseRecorded,
    PayloadsReleased,
    PolicyRecorded,
    RowsRecorded,
    RunRecorded,
    SampleNote,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.samples import is_evaluation

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.buffer.settings import BufferSettings
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Group, Sample


class Books:
    """Grants, groups, batches, versions and checkpoints of one run."""

    def __init__(
        self,
        settings: BufferSettings,
        policy: StalenessPolicy,
        row_of: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        """``row_of``: see :class:`~penstock.actors.buffer.histories.RowHistory`."""
        self.settings = settings
        self.policy = policy
        self.policy_recorded: PolicyRecorded | None = None
        """The last change; None: the scenario's policy holds."""
        self.is_paused = False
        """Nothing more is granted for training, until an operator says so."""
        self.engines: tuple[str, ...] = ()
        """Of the run, as recorded; empty: nothing is, or they never change."""
        self.goal = settings.goal
        self.identity: RunRecorded | None = None
        self.version = 0
        """Batches trained."""
        self.announced: int | None = None
        self.table = GroupTable()
        self.used = UsedGroups(settings.max_uses)
        self.settled = SettledGroups()
        self.accounts = Accounts(settings.samples_per_group)
        self.grants = Grants(num_prompts=settings.num_prompts, max_requeues=settings.max_requeues)
        self.open_lease: BatchLeased | None = None
        self.leases: dict[int, BatchLeased] = {}
        self.checkpoints: list[CheckpointRecorded] = []
        """Those that the run can be resumed from, the newest last."""
        self.released_through = 0
        self.num_trained_groups = 0
        self.max_staleness_seen = 0
        self.evaluations = Evaluations(settings.evaluation)
        self.rejections = Rejections()
        self.failures = Failures()
        self.history = RowHistory(row_of, tells_ends=settings.tells_row_ends)

    @property
    def checkpoint_version(self) -> int:
        """Of the newest checkpoint; −1: there is none."""
        return self.checkpoints[-1].version if self.checkpoints else -1

    @property
    def policy_name(self) -> str:
        """Of the policy that new grants follow."""
        return self.settings.policy_name if self.policy_recorded is None else self.policy_recorded.policy

    @property
    def num_steps(self) -> int:
        """Batches to train."""
        return self.goal.num_steps(self.settings.num_steps)

    @property
    def is_exhausted(self) -> bool:
        """The dataset has nothing left to grant."""
        return self.grants.num_left == 0

    @property
    def taken_at(self) -> int:
        """The version at which the next batch is taken."""
        return self.version + (self.open_lease is not None)

    def check_evaluation(self) -> None:
        """Whether the evaluation that is open, if one is, can go on.

        Raises:
            UserFault: the scenario evaluates on something else than when it was opened.
        """
        open_one, schedule = self.evaluations.open, self.settings.evaluation
        if open_one is not None and (schedule is None or schedule.datasets != open_one.datasets):
            begun = ", ".join(
                f"{shape.name} ({shape.num_rows} rows, {shape.samples_per_prompt} samples each)"
                for shape in open_one.datasets
            )
            raise UserFault(
                f"the evaluation of version {open_one.version} was begun on {begun} and is not done; the scenario "
                "evaluates on something else. Take the datasets that it was begun with, and change them once it is done"
            )

    def apply(self, entry: LedgerEntry) -> None:
        """Enter one record.

        Raises:
            UserFault: the first entry says that this is the ledger of another run.
        """
        self.table.steps.cause = type(entry)
        match entry:
            case GroupsGranted():
                self._grant(entry)
            case GroupRecorded():
                self.table.admit(entry)
                self.accounts.admitted(entry)
                self.settled.add(entry.group_id)
                self.rejections.admitted(entry)
                self.failures.admitted(entry)
                self.history.admitted(self.table.tracked(entry.group_id), entry)
            case GroupClosed():
                self._close(entry)
            case FailuresNoted():
                self.failures.noted(entry.ends)
            case BatchLeased():
                self.table.lease([group_id for group_id in entry.group_ids if group_id not in entry.again])
                self.used.leased(entry)
                self.open_lease = self.leases[entry.version] = entry
            case RowsRecorded():
                for row in entry.rows:
                    self.table.tracked(row.group_id).row = row
                self.history.recorded(entry)
            case StepRecorded():
                self._step(entry)
            case VersionRecorded():
                self.announced = entry.version
            case CheckpointRecorded():
                self.checkpoints = [*self.checkpoints, entry][-self.settings.keep_checkpoints :]
                self.leases = {v: lease for v, lease in self.leases.items() if v > entry.version}
            case PayloadsReleased():
                self.released_through = entry.through_version
                self.used.released(entry)
            case PauseRecorded() | EnginesRecorded() | PolicyRecorded():
                self.operate(entry)
            case EngineNoted():
                pass  # for people
            case RunRecorded():
                self.identify(entry)
            case BatchesFixed():
                self.goal = Replay(entry.batches)
                self.used.max_uses = max((batch.max_uses for batch in entry.batches), default=1)
            case EvaluationOpened():
                self.evaluations.opened(entry.evaluation)
                self.accounts.evaluation_opened(entry.evaluation.num_samples)
            case GroupEvaluated():
                self.evaluations.evaluated(entry)
                self.accounts.evaluated(entry.row.samples, entry.row.missing)
                self.failures.evaluated(entry.group_id, entry.row)
                self.settled.add(entry.group_id)
            case _:
                assert_never(entry)
        if isinstance(entry, self.goal.progress):
            self.rejections.num_since_progress = 0

    def operate(self, entry: PauseRecorded | EnginesRecorded | PolicyRecorded) -> None:
        """An operator has said what holds from here on."""
        match entry:
            case PauseRecorded():
                self.is_paused = entry.is_paused
            case EnginesRecorded():
                self.engines = entry.engines
            case PolicyRecorded():
                self.switch(entry)

    def switch(self, entry: PolicyRecorded) -> None:
        """New grants follow this policy."""
        self.policy_recorded = entry
        self.policy = builtin_policy(
            entry.policy,
            max_staleness=entry.max_staleness,
            update_mode=entry.update_mode,
            on_stale=entry.on_stale,
        )

    def identify(self, entry: RunRecorded | None) -> None:
        """The ledger says that it is of this run.

        Raises:
            UserFault: this is another one.
        """
        expected = self.settings.identity
        if entry is not None and expected is not None and expected != entry:
            names = [name for name in entry.__struct_fields__ if getattr(entry, name) != getattr(expected, name)]
            found = ", ".join(f"{name} {getattr(expected, name)} (was {getattr(entry, name)})" for name in names)
            raise UserFault(
                f"the run cannot go on with {found}: its group ids would mean other prompts. Take the scenario and the "
                f"dataset that it was begun with, or begin a new run"
            )
        self.identity = entry

    def _grant(self, entry: GroupsGranted) -> None:
        span = entry.span
        self.grants.take(span)
        for group_id, ordinal in groups_of(span):
            self.table.grant(
                TrackedGroup(group_id, ordinal, span.min_version, span.deadline_version, entry.max_staleness)
            )
        self.history.granted(span)
        self.accounts.granted(span.num_groups)
        self.evaluations.granted()

    def _close(self, entry: GroupClosed) -> None:
        tracked = self.table.remove(entry.group_id)
        self.accounts.closed(entry.ended, tracked.record)
        self.rejections.closed(entry)
        self.failures.closed(entry, was_admitted=tracked.record is not None)
        self.history.closed(tracked, entry)
        if entry.is_requeued:
            self.grants.requeue(tracked.ordinal)
        else:
            self._prompt_ended(tracked.ordinal)
        if entry.group_id not in self.settled:
            self.settled.add(entry.group_id)

    def _step(self, entry: StepRecorded) -> None:
        trained = [self.table.remove(group_id) for group_id in entry.group_ids if group_id not in entry.again]
        for tracked in trained:
            assert tracked.record is not None
            self._prompt_ended(tracked.ordinal)
            self.history.trained(tracked)
            self.accounts.trained(tracked.record)
        self.used.trained(entry.version, trained)
        self.version, self.open_lease = entry.version, None
        self.evaluations.stepped(entry.version)
        self.num_trained_groups += len(entry.group_ids)
        self.max_staleness_seen = max(self.max_staleness_seen, entry.max_staleness)

    def _prompt_ended(self, ordinal: int) -> None:
        self.grants.ended(ordinal)
        self.history.ended(ordinal)

    def awaits(self, group_id: int) -> bool:
        """Whether this group has been granted and has not come in."""
        if is_evaluation(group_id):
            return self.evaluations.waits_for(group_id)
        tracked = self.table.get(group_id)
        return tracked is not None and tracked.status is Status.GRANTED

    def payload(self, group_id: int) -> Group:
        """Of a group that is ready or leased."""
        record = self.table.tracked(group_id).record
        assert record is not None
        assert record.payload is not None
        return record.payload

    def validate(self) -> None:
        """Assert the invariants."""
        self.table.validate()
        self.settled.validate()
        balance = self.accounts.balance()
        assert balance.is_balanced, f"the accounts do not balance: {balance}"
        assert self.accounts.num_open_groups == self.table.num_outstanding
        assert self.accounts.in_system_tokens == sum(map(made_tokens, self.table.records()))
        self.evaluations.validate()
        assert self.accounts.num_in_evaluation == self.evaluations.num_in_system
        open_lease = self.open_lease
        assert open_lease is None or open_lease.version == self.version + 1
        leased = () if open_lease is None else [g for g in open_lease.group_ids if g not in open_lease.again]
        assert all(self.table.get(g) is None for g in self.used.usable(self.version, self.policy.max_staleness))
        assert self.table.num_leased == len(leased)
        assert all(self.table.tracked(group_id).status is Status.LEASED for group_id in leased)
        since = range(max(0, self.checkpoint_version) + 1, self.taken_at + 1)
        assert list(self.leases) == list(since), (list(self.leases), since)


def recorded(group: Group, deadline_version: int, kept_cause: str = "") -> GroupRecorded:
    """The entry for a group that is admitted."""
    return GroupRecorded(
        kept_cause=kept_cause,
        group_id=group.group_id,
        deadline_version=deadline_version,
        samples=tuple(map(note_of, group.samples)),
        ended=group.ended,
        payload=group,
        pushed=group.prompt.pushed,
    )


def note_of(sample: Sample) -> SampleNote:
    """What the ledger keeps of a sample for good."""
    oldest, newest = sample.version_bounds or (None, None)
    return SampleNote(
        sample.key.index,
        sample.attempt,
        sample.engine,
        str(type(sample.outcome).__struct_config__.tag),  # as it is called on the wire
        sample.num_tokens,
        oldest,
        newest,
        sample.reward,
        sample.num_given_tokens,
        sample.counts,
    )
