"""The oracle: watches a run on the virtual host from outside and knows what must be true after every event.

It keeps its own books from what the ledger was given and from what travels between the actors, and trusts no counter
of theirs. What it checks:

* every sample ends in exactly one state, no group is admitted twice or trained more often than it may be, and
  ``issued = Σ terminal + in the system`` both in its own books and in every balance that the Buffer reports;
* no token that is trained is older than the bound, recomputed from the version spans and the version of the batch;
* grants stay within ``(s + η + 1 − v)·B`` and what the rest of the run can train;
* versions go up by one, announced ones never go down, an engine makes no token with weights older than a sample may
  start with, responses have no hole and no repeat, rewards are those of the reward function;
* what :mod:`~trials.evaluation_watch` says of evaluations, and that training is as if there
  were none;
* what :mod:`~trials.row_watch` says of the rows that groups are drawn from;
* at the end nobody keeps or works on anything.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from penstock.messages.commands import Generate, OpenLearner, Send, Train
from penstock.messages.evaluation import EvaluationFinished, EvaluationOpened, GroupEvaluated
from penstock.messages.flow import SampleGenerated, SampleIssued
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
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.names import PROMPT_SOURCE, is_engine
from penstock.messages.samples import Sample, SampleKey, TerminalState, is_evaluation
from penstock.messages.training import OnStale, RunFinished
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.process import Process, Status
from trials.evaluation_watch import EvaluationWatch
from trials.oracle_checks import (
    Rules,
    WatchedGroup,
    assert_counted,
    assert_noted,
    assert_places,
    assert_ramp,
    assert_taught,
    assert_used_again,
    assert_whole,
    trained_versions,
    versions_of,
)
from trials.row_watch import RowWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.flow import GrantSpan
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import SampleEnd
    from penstock.messages.training import Balance
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.host import VirtualHost


class Oracle(IdleWatcher):
    """Asserts after every event."""

    def __init__(self, rules: Rules, host: VirtualHost) -> None:
        self.rules = rules
        self.version = 0
        """Batches trained, by the ledger."""
        self.announced: int | None = None
        self.groups: dict[int, WatchedGroup] = {}
        self.ends: dict[SampleKey, TerminalState] = {}
        self.issued: set[SampleKey] = set()
        """Samples that PromptSource has sent to an engine, at least once."""
        self.max_staleness_seen = 0
        self.num_generated_twice = 0
        """Responses that were finished by two attempts."""
        self.num_needless = 0
        """Samples issued again while somebody alive had them finished."""
        self.num_regenerated = 0
        """Samples issued again after their group was admitted."""
        self.num_used_again = 0
        """Uses of groups that had been trained before."""
        self.checkpoint_version = -1
        """Of the newest recorded checkpoint."""
        self.checkpoints: list[int] = []
        self.progress_s = 0.0
        """When the run last came closer to its end."""
        self.ended_s = 0.0
        """When a sample last ended."""
        self.trained: list[tuple[int, tuple[int, ...]]] = []
        """Version and groups of each step."""
        self.evaluations = EvaluationWatch(rules.evaluation)
        self.rows = RowWatch(rules.rows)
        self._clock = host.clock
        self._supervisor = host.supervisor
        self._processes = host.supervisor.processes
        self._eta = rules.max_staleness
        self._on_stale = rules.on_stale
        self._num_issued = 0
        self._num_open = 0
        self._num_in_generation = 0
        self._num_rejected = 0
        """Groups that the Filter turned away, since a batch was formed."""
        self._num_trained_groups = 0
        self._lease: BatchLeased | None = None
        self._leases: dict[int, tuple[int, ...]] = {}
        """Groups of every batch that was ever leased, by the version that it makes."""
        self._writer_epoch = -1
        self._ordinals: Counter[int] = Counter()
        self._finished: dict[SampleKey, int] = {}
        """Attempt that finished a sample first."""
        self._trained_versions: dict[int, tuple[int, ...]] = {}

    # --- what travels -----------------------------------------------------------------------------------------

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        for command in commands:
            match command:
                case Send():
                    self._on_send(process, command.event)
                case Train():
                    self._on_train(command)
                case Generate():
                    self._on_generate(command)
                case OpenLearner():
                    known = command.version in self.checkpoints or not (command.version or self.checkpoints)
                    assert known, f"version {command.version} is loaded, recorded are {self.checkpoints}"
                case _:
                    pass
        self._assert_balanced()

    def _on_send(self, process: Process, event: Event) -> None:
        match event:
            case SampleIssued() if is_evaluation(event.key.group_id):
                self.evaluations.issued(event)
                self._note_issued(process, event.key, is_recorded=False)
            case SampleIssued():
                group = self.groups.get(event.key.group_id)
                assert group is not None, f"{event.key} is issued, and its group was never granted"
                assert event.min_version == group.min_version
                if process.epoch >= self._supervisor.first_epoch:  # or it wakes up behind the loss of the machine
                    self.rows.issued(event.key.group_id, event.prompt.row)
                self._note_issued(process, event.key, is_recorded=group.payload is not None)
            case SampleGenerated():
                self._on_generated(event.sample)
            case _:
                pass

    def _note_issued(self, process: Process, key: SampleKey, *, is_recorded: bool) -> None:
        if key in self.issued and self._processes[process.name] is process:
            self.num_regenerated += is_recorded
            self.num_needless += key in self._finished and self._is_passed_on(key)
        self.issued.add(key)

    def _is_passed_on(self, key: SampleKey) -> bool:
        """Whether a finished response of this sample is kept, or being scored or assembled, by anyone alive."""
        for process in self._processes.values():
            if process.status is Status.RUNNING and process.name != PROMPT_SOURCE:
                at_work = () if is_engine(process.name) else process.shell.machine.leases()
                if any(lease.key == key for lease in (*process.shell.delivery.leases(), *at_work)):
                    return True
        return False

    def _on_generated(self, sample: Sample) -> None:
        first = self._finished.setdefault(sample.key, sample.attempt)
        self.num_generated_twice += first != sample.attempt
        if is_evaluation(sample.key.group_id):
            self.evaluations.generated(sample)
            return
        assert_whole(sample)
        oldest, group = sample.oldest_version, self.groups[sample.key.group_id]
        assert oldest is None or oldest >= group.min_version, (
            f"{sample.key} has a token of version {oldest}, it may start with {group.min_version}"
        )

    def _on_generate(self, command: Generate) -> None:
        prefix = command.prefix
        if prefix is not None:
            assert_ramp(prefix.tokens, str(command.key))

    def _on_train(self, command: Train) -> None:
        """What the Learner's backend is told to train."""
        lease = self._leases.get(command.version)
        group_ids = tuple(group.group_id for group in command.groups)
        assert lease == group_ids, f"version {command.version} of {group_ids} is trained, the lease is {lease}"
        assert self._trained_versions.setdefault(command.version, group_ids) == group_ids
        consumed_at = command.version - 1
        for group in command.groups:
            assert group == self.groups[group.group_id].payload, f"group {group.group_id} changed on its way"
            eta = self.groups[group.group_id].max_staleness
            for version in trained_versions(group.samples, newest_only=command.mask_old_tokens):
                age = consumed_at - version
                if command.min_token_version:
                    assert command.min_token_version >= consumed_at - max(eta, self._eta)
                    if version < command.min_token_version:
                        continue
                assert age <= eta, f"group {group.group_id}: a token of version {version} is trained at {consumed_at}"
                self.max_staleness_seen = max(self.max_staleness_seen, age)

    # --- the ledger -------------------------------------------------------------------------------------------

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        assert process.epoch >= self._writer_epoch, f"{process.name} {process.epoch} writes after a successor"
        self._writer_epoch = process.epoch
        granted = False
        for entry in entries:
            if granted and not isinstance(entry, GroupsGranted):  # grants belong together, and to what was before them
                self._assert_grants_within_bound()
                granted = False
            match entry:
                case GroupsGranted():
                    self._on_granted(entry.span)
                    assert entry.total == len(self.groups)
                    granted = True
                case GroupRecorded():
                    self._on_recorded(entry)
                case GroupClosed():
                    self._on_closed(entry)
                case BatchLeased():
                    self._on_leased(entry)
                case StepRecorded():
                    self._on_step(entry)
                case VersionRecorded():
                    assert self.announced is None or entry.version > self.announced, "an announced version went down"
                    self.announced = entry.version
                    self.progress_s = self._clock.now_s
                case CheckpointRecorded():
                    assert entry.version <= self.version, "a checkpoint is recorded before its receipt"
                    assert entry.version > self.checkpoint_version, "checkpoints go back"
                    self.checkpoint_version = entry.version
                    self.checkpoints.append(entry.version)
                    self.progress_s = self._clock.now_s
                case PayloadsReleased():
                    self._on_released(entry)
                case EvaluationOpened():
                    if not self._may_train_on() and entry.evaluation.version == self.version:
                        self.evaluations.ran_out(self.version)
                    self.evaluations.opened(entry, announced=self.announced)
                    self.progress_s = self._clock.now_s
                case GroupEvaluated():
                    self.evaluations.evaluated(entry)
                    self.progress_s = self._clock.now_s
                case RunRecorded():
                    assert not self.groups, "the run is named after it began"
                case PolicyRecorded():
                    self._eta, self._on_stale = entry.max_staleness, entry.on_stale
                case PauseRecorded():
                    pass  # the watch of the operator looks at it
                case EnginesRecorded():
                    pass  # the watch of engines that join and leave does
                case EngineNoted():
                    assert entry.text, f"a line about {entry.engine} says nothing"
                case FailuresNoted():
                    for end in entry.ends:
                        assert end.reason, f"{end.key} failed, and nobody says why"
                        assert end.state is TerminalState.FAILED
                case RowsRecorded():
                    self.rows.recorded(entry)
                case BatchesFixed():
                    assert not self.groups, "what a run trains is fixed before it begins"
        if granted:
            self._assert_grants_within_bound()
        self._assert_balanced()

    def _on_granted(self, span: GrantSpan) -> None:
        assert span.first_group == len(self.groups), "group ids are issued in order"
        assert span.min_version == self.announced, f"groups may start with {span.min_version}, not {self.announced}"
        assert span.deadline_version == span.min_version + self._eta, f"the deadline is not that of the bound: {span}"
        for offset in range(span.num_groups):
            group_id, ordinal = span.first_group + offset, span.first_ordinal + offset
            self.groups[group_id] = WatchedGroup(group_id, span.min_version, span.deadline_version, self._eta)
            self._ordinals[ordinal] += 1
            assert self._ordinals[ordinal] <= self.rules.max_requeues + 1, f"prompt {ordinal} is granted too often"
        self.rows.granted(span)
        self._num_issued += span.num_groups * self.rules.samples_per_group
        self._num_open += span.num_groups
        self._num_in_generation += span.num_groups

    def _assert_grants_within_bound(self) -> None:
        rules, announced = self.rules, self.announced
        assert announced is not None
        bound = (announced + self._eta + 1 - self.version) * rules.groups_per_batch
        assert self._num_open <= math.ceil(bound * rules.over_sampling), (
            f"{self._num_open} groups are outstanding at v={self.version}, s={announced}; the bound is {bound}"
        )
        num_again = 0 if self._lease is None else len(self._lease.again)  # their places are taken
        left = (rules.num_steps * rules.groups_per_batch - self._num_trained_groups - num_again) * rules.over_sampling
        assert self._num_open <= math.ceil(left), f"{self._num_open} groups are outstanding, {left} can be trained"
        if rules.max_concurrent is not None:
            assert self._num_in_generation <= rules.max_concurrent
        if rules.num_prompts is not None:
            assert len(self._ordinals) <= rules.num_prompts
        if self._on_stale is OnStale.WAIT and rules.over_sampling == 1.0:
            self._assert_sound()

    def _assert_sound(self) -> None:
        """For every ``d ≥ v`` at most ``(d − v + 1)·B`` outstanding groups have a deadline ``≤ d``."""
        standing = self.version + (self._lease is not None)
        deadlines = sorted(g.deadline for g in self.groups.values() if not g.is_closed and not g.is_leased)
        for count, deadline in enumerate(deadlines, start=1):
            room = (deadline - standing + 1) * self.rules.groups_per_batch
            assert count <= room, f"{count} groups are due by {deadline} at v={standing}: {deadlines}"

    def _may_keep(self, entry: GroupRecorded) -> bool:
        """Whether enough groups were turned away, or the dataset has ended and the last batch would lack this one."""
        rules, size = self.rules, self.rules.groups_per_batch
        if rules.keep_after_batches is None:
            return False
        in_no_batch = sum(not group.is_closed and not group.is_leased for group in self.groups.values())
        ends = rules.num_prompts is not None and len(self._ordinals) == rules.num_prompts and in_no_batch <= size
        return ends or self._num_rejected >= rules.keep_after_batches * size

    def _on_recorded(self, entry: GroupRecorded) -> None:
        assert not entry.kept_cause or self._may_keep(entry), f"group {entry.group_id} is kept: {entry.kept_cause}"
        group, payload = self._open(entry.group_id), entry.payload
        assert payload is not None
        assert payload.group_id == entry.group_id
        assert group.payload is None, f"group {group.group_id} is admitted twice"
        assert entry.deadline_version >= group.deadline, "a deadline went down"
        group.payload, group.deadline = payload, entry.deadline_version
        self._num_in_generation -= 1
        samples = payload.samples
        assert samples, f"group {group.group_id} is admitted without a sample"
        assert_noted(entry)
        assert_places(samples, payload.ended, group, self.rules)
        assert_counted(payload, self.rules)
        self.rows.admitted(entry.group_id, payload.prompt.row)
        for sample in samples:
            assert sample.reward in (0.0, 1.0), f"{sample.key} has the reward {sample.reward}"
            assert_whole(sample)
            assert_taught(sample, payload.prompt, has_teachers=self.rules.has_teachers)
        oldest = min(versions_of(samples), default=None)
        assert oldest is None or oldest >= group.min_version
        if oldest is not None:
            assert entry.deadline_version <= max(oldest + group.max_staleness, group.min_version + group.max_staleness)

    def _on_closed(self, entry: GroupClosed) -> None:
        rules = self.rules
        group = self._open(entry.group_id)
        assert not group.is_leased, f"group {entry.group_id} is closed while it is in a batch"
        if entry.rejected_cause:
            self._num_rejected += 1
            self.rows.rejected()
        keys = [end.key for end in entry.ended]
        if group.payload is None:
            assert_places((), entry.ended, group, self.rules)
            self._num_in_generation -= 1
        else:
            held = [*(s.key for s in group.payload.samples), *(e.key for e in group.payload.ended)]
            assert sorted(held) == sorted(keys), (
                f"group {entry.group_id} ends with other samples than it was admitted with"
            )
        for end in entry.ended:
            assert end.state is not TerminalState.TRAINED
        if self._on_stale is OnStale.WAIT:
            assert all(end.state is not TerminalState.STALE for end in entry.ended), "stale under wait"
            if rules.max_uses > 1 and rules.on_stale is OnStale.WAIT:
                assert all(end.cause != "run_end" for end in entry.ended), "left over, as used groups took its place"
        self._end_group(group, entry.ended)

    def _on_leased(self, entry: BatchLeased) -> None:
        rules = self.rules
        assert self._lease is None, "two batches are out"
        assert entry.version == self.version + 1, f"batch {entry.version} is leased at {self.version}"
        assert entry.version <= rules.num_steps
        assert len(entry.group_ids) == len(set(entry.group_ids)) <= rules.groups_per_batch
        if len(entry.group_ids) < rules.groups_per_batch:
            assert rules.num_prompts is not None, "a short batch, and the dataset has not ended"
        assert_used_again(entry, self.groups, rules)
        for group_id in entry.group_ids:
            if group_id in entry.again:
                continue
            group = self._open(group_id)
            assert group.payload is not None, f"group {group_id} is leased before it is admitted"
            assert not group.is_leased
            group.is_leased = True
            if self._on_stale is not OnStale.MASK:
                assert group.deadline >= self.version, f"group {group_id} was due at {group.deadline}"
        self.evaluations.leased(entry.version)
        assert entry.version not in self._leases, f"batch {entry.version} is leased twice"
        self._lease, self._num_rejected = entry, 0
        self._leases[entry.version] = entry.group_ids
        if self._on_stale is OnStale.WAIT and rules.over_sampling == 1.0:
            self._assert_sound()

    def _on_step(self, entry: StepRecorded) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        assert (entry.version, entry.group_ids, entry.uses) == (lease.version, lease.group_ids, lease.uses)
        assert self._trained_versions.get(entry.version) == entry.group_ids, "a receipt for what was not trained"
        self.version = entry.version
        self._num_trained_groups += len(entry.group_ids)
        self.trained.append((entry.version, entry.group_ids))
        self.progress_s = self._clock.now_s
        self.evaluations.stepped(entry.version, is_last=lease.is_last)
        self.num_used_again += len(entry.again)
        for group_id in entry.group_ids:
            if group_id in entry.again:
                continue
            group = self._open(group_id)
            assert group.payload is not None
            for sample in group.payload.samples:
                self._end_sample(sample.key, TerminalState.TRAINED)
            self._end_group(group, group.payload.ended)

    def _on_released(self, entry: PayloadsReleased) -> None:
        """No checkpoint that is kept needs what goes."""
        kept = self.checkpoints[-self.rules.keep_checkpoints :]
        assert kept, "payloads go, and there is no checkpoint"
        assert entry.through_version <= kept[0], f"payloads up to {entry.through_version} go, {kept} need them"

    def _may_train_on(self) -> bool:
        """Whether a batch is out, or something is left that one could be made of."""
        rules = self.rules
        if self._lease is not None:
            return True
        if self.version >= rules.num_steps:
            return False
        return rules.num_prompts is None or len(self._ordinals) < rules.num_prompts or self._num_open > 0

    # --- the books --------------------------------------------------------------------------------------------

    def _open(self, group_id: int) -> WatchedGroup:
        group = self.groups[group_id]
        assert not group.is_closed, f"group {group_id} has ended already"
        return group

    def _end_group(self, group: WatchedGroup, ended: Iterable[SampleEnd]) -> None:
        for end in ended:
            self._end_sample(end.key, end.state)
        group.is_closed = True
        self._num_open -= 1

    def _end_sample(self, key: SampleKey, state: TerminalState) -> None:
        assert key not in self.ends, f"{key} ends as {state}, and has ended as {self.ends[key]}"
        self.ends[key] = state
        self.ended_s = self._clock.now_s
        self._num_issued += key.index >= self.rules.samples_per_group

    def _assert_balanced(self) -> None:
        in_system = self._num_open * self.rules.samples_per_group
        assert self._num_issued == len(self.ends) + in_system, (
            f"{self._num_issued} samples are issued, {len(self.ends)} have ended, {in_system} are in the system"
        )

    def heard(self, process: Process, event: Event) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if isinstance(event, RunFinished):
            self._assert_same(event.balance)
        elif isinstance(event, EvaluationFinished):
            self.evaluations.finished(event)

    def _assert_same(self, balance: Balance) -> None:
        """The Buffer's balance is ours."""
        assert balance.is_balanced, balance
        ended = Counter(self.ends.values()) + self.evaluations.ended
        theirs: Counter[TerminalState] = Counter()
        for count in balance.ended:
            theirs[TerminalState(count.state)] += count.num_samples
        assert theirs == ended, f"the Buffer counts {theirs}, there were {ended}"
        assert balance.issued == self._num_issued + self.evaluations.num_issued
        in_system = self._num_open * self.rules.samples_per_group
        assert balance.in_system == in_system + self.evaluations.num_in_system

    def assert_ended(self) -> None:
        """Everything that was granted is terminal, and so is everything that was ever sent to an engine."""
        open_groups = [group.group_id for group in self.groups.values() if not group.is_closed]
        assert not open_groups, f"groups {open_groups} have not ended"
        size = self.rules.samples_per_group
        self.evaluations.assert_ended(self.version)
        self.rows.assert_ended()
        trained = (key for key in self.issued if not is_evaluation(key.group_id))
        lost = [key for key in trained if key not in self.ends and key.index < size]
        assert not lost, f"samples {lost} were issued and have no end"
        assert max(0, self.checkpoint_version) == self.version, "the run ended before its last checkpoint was recorded"
