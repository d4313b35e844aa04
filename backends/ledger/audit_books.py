"""The auditor's books: the ledger's log read again from its first entry, by other code than that which wrote it.

Invariants:

* Nothing here trusts an earlier entry to be right. What contradicts the books is a finding, and does not enter them.
* ``issued`` grows when groups are granted and when a replacement of a failed sample turns up, ends and samples in the
  system are counted on their own: so a sample that was lost or counted twice shows as an imbalance.
* A group that has ended keeps a few numbers and a hash of what the tables must say of it: the books stay small.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, assert_never

from penstock.backends.ledger.audited_evaluations import AuditedEvaluations
from penstock.backends.ledger.audited_group import AuditedGroup, Finding, digest, granted, listed
from penstock.backends.ledger.audited_operator import AuditedOperator
from penstock.backends.ledger.audited_uses import KeptPayloads, wrong_ages, wrong_use
from penstock.backends.ledger.tables import ADMITTED, CLOSED, GRANTED, LEASED, TRAINED
from penstock.messages.evaluation import EvaluationOpened, GroupEvaluated
from penstock.messages.ledger import (
    EPOCHS_PER_DRIVE,
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
from penstock.messages.samples import TerminalState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.ledger.audited_group import SampleRow
    from penstock.messages.evaluation import EvaluatedSample
    from penstock.messages.ledger import LedgerEntry, SampleNote
    from penstock.messages.samples import SampleEnd


class AuditBooks:
    """The fold. Feed every entry in order to ``apply``."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.run: RunRecorded | None = None
        self.groups: list[AuditedGroup] = []
        """By id."""
        self.num_entries = 0
        self.sequence = 0
        """Of the last entry."""
        self.epoch = -1
        self.version = 0
        self.announced = -1
        self.lease: BatchLeased | None = None
        self.fixed: dict[int, BatchLeased] | None = None
        """Batches that were given beforehand, by version."""
        self.leases: dict[int, BatchLeased] = {}
        self.steps: dict[int, tuple[int, StepRecorded]] = {}
        """Receipts with their sequence."""
        self.versions: list[int] = []
        self.checkpoints: dict[int, str] = {}
        self.operator = AuditedOperator(self._find)
        self._kept = KeptPayloads()
        self.max_staleness = 0
        self.issued = 0
        self.num_tokens = 0
        """That the model made, of every sample that came."""
        self.ended: dict[tuple[str, str], list[int]] = {}
        """By terminal state and cause: samples, tokens of their responses, and those of these that were given."""
        self.untrained_tokens: dict[int, int] = {}
        """By version: tokens of its samples that its receipt does not name. Those that the model did not make."""
        self.evaluations = AuditedEvaluations(self._find)
        self._last_drive = -1
        """In which the last batch was leased; −1: none was the last yet."""
        self.next_ordinal = 0
        """The first prompt that was never granted."""
        self._requeued: Counter[int] = Counter()
        self._drawn: set[int] = set()
        """Groups whose row is recorded, as long as they are granted and nothing more."""

    def apply(self, sequence: int, epoch: int, entry: LedgerEntry) -> None:
        """Enter one entry."""
        if sequence != self.sequence + 1:
            self._find(f"follows entry {self.sequence}: entries are missing", sequence)
        self.sequence = sequence
        self.num_entries += 1
        if epoch < self.epoch:
            self._find(f"written by epoch {epoch} after epoch {self.epoch}: two writers")
        self.epoch = max(self.epoch, epoch)
        if self.run is None and not isinstance(entry, RunRecorded):
            if sequence == 1:
                self._find(f"the first entry is {type(entry).__name__}, it must be RunRecorded")
            return
        self._dispatch(entry)

    def _dispatch(self, entry: LedgerEntry) -> None:
        match entry:
            case RunRecorded():
                if self.run is not None and entry != self.run:
                    self._find(f"the run is said to be another one: {entry}, it was {self.run}")
                self.run = self.run or entry
            case GroupsGranted():
                self._grant(entry)
            case GroupRecorded():
                self._admit(entry)
            case GroupClosed():
                self._close(entry)
            case RowsRecorded():
                self._draw(entry)
            case FailuresNoted() | EngineNoted():
                pass  # the latter changes nothing; of the former, the end of each of them is in the entry of its group
            case BatchLeased():
                self._lease(entry)
            case StepRecorded():
                self._step(entry)
            case CheckpointRecorded():
                self._checkpoint(entry)
            case PayloadsReleased():
                self._release(entry)
            case VersionRecorded():
                self._announce(entry.version)
            case PolicyRecorded() | PauseRecorded() | EnginesRecorded():
                self.operator.recorded(self.sequence, entry)
            case BatchesFixed():
                self._fix(entry)
            case EvaluationOpened():
                if self.evaluations.open(entry, announced=self.announced):
                    self.issued += entry.evaluation.num_samples
            case GroupEvaluated():
                self._evaluate(entry)
            case _:
                assert_never(entry)

    # --- what the books come to -------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Samples of a group."""
        return 0 if self.run is None else self.run.samples_per_group

    def in_system(self) -> tuple[int, int]:
        """Samples that are in the system, and the tokens that the model made of those that were admitted."""
        num_samples = num_tokens = 0
        for group in self.groups:
            if group.state == GRANTED:
                num_samples += self.size
            num_samples += len(group.notes)
            num_tokens += sum(note.num_made_tokens for note in group.notes)
        return num_samples + self.evaluations.num_in_system, num_tokens

    def payload_ids(self) -> set[int]:
        """Groups whose payload must be there: open ones, and those of batches that may be trained again."""
        kept = {group.group_id for group in self.groups if group.state in (ADMITTED, LEASED)}
        for version, (_, step) in self.steps.items():
            if version > self.released_through:
                kept.update(step.group_ids)
        return kept | self._kept.ids

    @property
    def released_through(self) -> int:
        """Version up to which payloads were let go of."""
        return self._kept.released_through

    def resumable(self) -> dict[int, str]:
        """Checkpoints that the run can be resumed from, by version."""
        return {version: path for version, path in self.checkpoints.items() if version >= self.released_through}

    def digest_of(self, group: AuditedGroup) -> int:
        """Of the rows that the tables must have about a group."""
        return group.digest if group.digest is not None else digest(group.state, group.row(), group.sample_rows())

    # --- groups -----------------------------------------------------------------------------------------------

    def _grant(self, entry: GroupsGranted) -> None:
        span = entry.span
        total = len(self.groups)
        if span.first_group != total or entry.total != total + span.num_groups:
            self._find(
                f"groups {span.first_group} to {span.first_group + span.num_groups - 1} of {entry.total} are granted "
                f"after {total} groups: ids have a gap or repeat"
            )
            return
        if span.min_version > self.announced:
            self._find(f"groups are granted for version {span.min_version}, which has not been announced")
        if span.deadline_version > span.min_version + entry.max_staleness:
            self._find(
                f"groups get the deadline {span.deadline_version}: version {span.min_version} and a bound of "
                f"{entry.max_staleness} allow {span.min_version + entry.max_staleness}"
            )
        self.operator.granted(entry)
        for offset in range(span.num_groups):
            self._take_prompt(span.first_group + offset, span.first_ordinal + offset)
            self.groups.append(granted(span, offset, entry.max_staleness))
        self.issued += span.num_groups * self.size

    def _take_prompt(self, group_id: int, ordinal: int) -> None:
        if self._requeued[ordinal]:
            self._requeued[ordinal] -= 1
        elif ordinal == self.next_ordinal:
            self.next_ordinal += 1
        else:
            self._find(f"group {group_id} is granted for prompt {ordinal}: prompt {self.next_ordinal} is next")
            self.next_ordinal = max(self.next_ordinal, ordinal + 1)

    def _draw(self, entry: RowsRecorded) -> None:
        for row in entry.rows:
            group = self._known(row.group_id, (GRANTED,), "given a row")
            if group is not None and group.group_id in self._drawn:
                self._find(f"group {group.group_id} is given a row twice")
            if self.run is not None and not 0 <= row.row < self.run.num_rows:
                self._find(f"group {row.group_id} is drawn from row {row.row}, the dataset has {self.run.num_rows}")
            self._drawn.add(row.group_id)

    def _admit(self, entry: GroupRecorded) -> None:
        group = self._known(entry.group_id, (GRANTED,), "admitted")
        if group is None or not self._is_whole(entry.group_id, [n.index for n in entry.samples], entry.ended):
            return
        group.notes = entry.samples
        self.operator.generated(() if entry.pushed else entry.samples)
        oldest = group.oldest_version
        if oldest is not None and oldest < group.min_version:
            self._find(
                f"group {group.group_id} has a token of version {oldest}, it was granted for {group.min_version}"
            )
        born = group.deadline_version if oldest is None else oldest + group.max_staleness
        if entry.deadline_version != max(group.deadline_version, born):
            self._find(
                f"group {group.group_id} gets the deadline {entry.deadline_version}: its tokens and its grant make it "
                f"{max(group.deadline_version, born)}"
            )
        self._drawn.discard(group.group_id)
        group.state, group.deadline_version, group.pushed = ADMITTED, entry.deadline_version, entry.pushed
        group.ended = {end.key.index: end for end in entry.ended}
        self.num_tokens += sum(note.num_made_tokens for note in entry.samples)
        self._count(entry.ended)

    def _close(self, entry: GroupClosed) -> None:
        group = self._known(entry.group_id, (GRANTED, ADMITTED), "closed")
        if group is None:
            return
        self._drawn.discard(group.group_id)
        if group.state == GRANTED:
            if not self._is_whole(group.group_id, [], entry.ended):
                return
            new: Sequence[SampleEnd] = entry.ended
        else:
            new = self._ends_of_admitted(group, entry)
            self.num_tokens -= sum(note.num_made_tokens for note in group.notes)  # counted anew with their ends
        self._count(new)
        rows = group.sample_rows(new)
        group.state, group.is_requeued = CLOSED, entry.is_requeued
        self._requeued[group.ordinal] += entry.is_requeued
        self._forget(group, rows)

    def _ends_of_admitted(self, group: AuditedGroup, entry: GroupClosed) -> list[SampleEnd]:
        """The ends of the samples that were in the system; those that had ended may be named again, unchanged."""
        notes = {note.index: note for note in group.notes}
        new: dict[int, SampleEnd] = {}
        for end in entry.ended:
            index = end.key.index
            if group.ended.get(index) == end:
                continue
            note = notes.get(index)
            if note is None or end.key.group_id != group.group_id or index in new or end.num_tokens != note.num_tokens:
                self._find(f"group {group.group_id} is closed with {end.key} as {end}, which contradicts its admission")
            else:
                new[index] = end
        if missing := sorted(set(notes) - set(new)):
            self._find(f"group {group.group_id} is closed without an end of its samples {listed(missing)}")
        return list(new.values())

    def _is_whole(self, group_id: int, indices: list[int], ended: Sequence[SampleEnd]) -> bool:
        """Every sample of the group is named once, replacements beside failed ones. Issues the replacements."""
        keys = [*indices, *(end.key.index for end in ended)]
        named, size = set(keys), self.size
        failed = {end.key.index for end in ended if end.state is TerminalState.FAILED}
        unfounded = sorted(index for index in named if index >= size and index - size not in failed)
        if len(named) != len(keys) or any(end.key.group_id != group_id for end in ended):
            self._find(f"group {group_id} names a sample twice, or one of another group")
        elif lacking := sorted({*range(size)} - named):
            self._find(f"group {group_id} lacks its samples {listed(lacking)}")
        elif unfounded:
            self._find(f"group {group_id} has replacements {listed(unfounded)} of samples that have not failed")
        else:
            self.issued += sum(1 for index in keys if index >= size)
            return True
        return False

    def _count(self, ended: Iterable[SampleEnd]) -> None:
        for end in ended:
            if end.state is TerminalState.TRAINED:
                self._find(f"sample {end.key} is said to be trained without a receipt")
            self.num_tokens += end.num_made_tokens
            self._end(end.state.value, end.cause, end)

    def _end(self, state: str, cause: str, sample: SampleEnd | SampleNote | EvaluatedSample) -> None:
        counts = self.ended.setdefault((state, cause), [0, 0, 0])
        for place, number in enumerate((1, sample.num_tokens, sample.num_given_tokens)):
            counts[place] += number

    def _evaluate(self, entry: GroupEvaluated) -> None:
        if not self.evaluations.evaluated(entry):
            return
        for sample in entry.row.samples:
            self.num_tokens += sample.num_made_tokens
            self._end(TerminalState.EVALUATED.value, "", sample)
        self._count(entry.row.missing)

    # --- batches ----------------------------------------------------------------------------------------------

    def _fix(self, entry: BatchesFixed) -> None:
        if self.fixed is not None or self.leases:
            self._find("the batches are fixed after some were leased, or twice")
            return
        self.fixed = {batch.version: batch for batch in entry.batches}
        if list(self.fixed) != list(range(1, len(entry.batches) + 1)):
            self._find(f"the fixed batches make the versions {listed(sorted(self.fixed))}, not 1 and on")

    def _lease(self, entry: BatchLeased) -> None:
        if self.lease is not None:
            self._find(f"batch {entry.version} is leased while batch {self.lease.version} is out")
            return
        if entry.version != self.version + 1:
            self._find(f"batch {entry.version} is leased at version {self.version}: it must be {self.version + 1}")
            return
        if (held := self.evaluations.open_one) is not None and held.opened.is_pinned:
            self._find(f"batch {entry.version} is leased while the pinned evaluation {held.opened.number} is open")
        if self.fixed is not None and _batch_of(self.fixed.get(entry.version)) != _batch_of(entry):
            self._find(f"batch {entry.version} is another one than was fixed beforehand")
        if self._last_drive == self.epoch // EPOCHS_PER_DRIVE:  # a resumed run may have been made longer
            self._find(f"batch {entry.version} is leased after the last one")
        if entry.is_last:
            self._last_drive = self.epoch // EPOCHS_PER_DRIVE
        if len(set(entry.group_ids)) != len(entry.group_ids):
            self._find(f"batch {entry.version} has a group twice")
            return
        wanted = 0 if self.run is None else self.run.groups_per_batch
        if len(entry.group_ids) != wanted and not (entry.is_last and len(entry.group_ids) < wanted):
            self._find(f"batch {entry.version} has {len(entry.group_ids)} groups, it must have {wanted}")
        for position, group_id in enumerate(entry.group_ids):
            self._use(entry, position, group_id)
        self.lease = self.leases[entry.version] = entry

    def _use(self, entry: BatchLeased, position: int, group_id: int) -> None:
        use = entry.uses[position] if entry.uses else 1
        group = self._known(group_id, (ADMITTED,) if use == 1 else (TRAINED,), "leased")
        if group is None:
            return
        for text in wrong_use(entry, use, group, is_released=self._kept.is_released(group)):
            self._find(text)
        group.num_uses = use
        if use == 1:
            group.state, group.version, group.position = LEASED, entry.version, position

    def _step(self, entry: StepRecorded) -> None:
        lease = self.lease
        if lease is None or lease.version != entry.version:
            out = "no batch is" if lease is None else f"batch {lease.version} is"
            self._find(f"a receipt of version {entry.version} while {out} out, at version {self.version}")
            return
        if (entry.group_ids, entry.uses) != (lease.group_ids, lease.uses):
            self._find(f"the receipt of version {entry.version} names other groups than its lease")
            return
        groups, used = self._which_are(LEASED, entry.group_ids), self._which_are(TRAINED, entry.again)
        for group in groups:
            group.remember()
        for text in wrong_ages(entry, lease, [*groups, *used]):
            self._find(text)
        named = entry.num_trained_tokens + entry.num_masked_tokens
        came = sum(group.num_tokens for group in (*groups, *used))
        if named != came:
            self.untrained_tokens[entry.version] = came - named
        self.version, self.lease = entry.version, None
        self.max_staleness = max(self.max_staleness, entry.max_staleness)
        self.steps[entry.version] = (self.sequence, entry)
        for group in groups:
            for note in group.notes:
                self._end(TRAINED, "", note)
            group.state = TRAINED
            self._forget(group, group.sample_rows())

    def _which_are(self, state: str, group_ids: Iterable[int]) -> list[AuditedGroup]:
        """Without those that the lease should not have named: they were found when it was leased."""
        groups = (self.groups[group_id] for group_id in group_ids if group_id < len(self.groups))
        return [group for group in groups if group.state == state]

    # --- versions and checkpoints -----------------------------------------------------------------------------

    def _checkpoint(self, entry: CheckpointRecorded) -> None:
        if entry.version > self.version:
            self._find(f"checkpoint {entry.version} is ahead of the receipts, which end at {self.version}")
        if entry.version <= (newest := max(self.checkpoints, default=-1)):
            self._find(f"checkpoint {entry.version} is recorded after checkpoint {newest}")
        self.checkpoints[entry.version] = entry.path

    def _release(self, entry: PayloadsReleased) -> None:
        through = entry.through_version
        if through < self.released_through:
            self._find(f"payloads up to {through} are released, those up to {self.released_through} had been")
        elif through and through not in self.checkpoints:
            self._find(f"payloads up to {through} are released, and there is no checkpoint of that version")
        kept = [self._known(group_id, (TRAINED,), "kept") for group_id in entry.kept]
        for group in self._kept.release(through, [group for group in kept if group is not None]):
            self._find(f"the payload of group {group.group_id} is kept, and had been released")

    def _announce(self, version: int) -> None:
        if version < self.announced:
            self._find(f"version {version} is announced after version {self.announced}: versions go down")
        if version > self.version + 1:
            self._find(f"version {version} is announced, the receipts end at {self.version}")
        self.announced = max(version, self.announced)
        self.versions.append(version)

    # --- notes ------------------------------------------------------------------------------------------------

    def _known(self, group_id: int, states: tuple[str, ...], doing: str) -> AuditedGroup | None:
        if not 0 <= group_id < len(self.groups):
            self._find(f"group {group_id} is {doing} and was never granted")
            return None
        group = self.groups[group_id]
        if group.state not in states:
            self._find(f"group {group_id} is {doing} when it is {group.state} already")
            return None
        return group

    def _forget(self, group: AuditedGroup, rows: list[SampleRow]) -> None:
        group.digest = digest(group.state, group.row(), rows)
        group.notes, group.ended = (), {}

    def _find(self, text: str, sequence: int = 0) -> None:
        self.findings.append(Finding(sequence or self.sequence, text))


def _batch_of(lease: BatchLeased | None) -> tuple[tuple[int, ...], tuple[int, ...], int, bool, bool] | None:
    """What a lease says of the training: whether it is the last depends on ``run.num_steps``."""
    if lease is None:
        return None
    return lease.group_ids, lease.uses, lease.max_staleness, lease.mask_stale, lease.mask_old_tokens
