"""What a run has recorded, as the first entries of the ledger of another run, which trains it again.

Invariants:

* The batches are those of the recorded run, with the same groups in the same order; its open batch, which was offered
  and not trained, is one of them. Of a run that has only collected groups, batches are formed in the order in which
  the groups came.
* Groups keep their ids. Those that were in no batch are closed at once, so that the new ledger balances by itself: what
  was filtered is filtered, what was neither trained nor closed is cancelled.
* A grant is written with no version but 0, as no engine serves any, and with the bound that its batch was formed under.
* Nothing is written before it is certain that every sample is still there.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from penstock.backends.ledger.archive import archived_steps
from penstock.backends.ledger.archived_groups import read_archived
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.flow import GrantSpan
from penstock.messages.ledger import (
    BatchesFixed,
    BatchLeased,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    RunRecorded,
    VersionRecorded,
)
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Group

SAMPLES_FOLDER: Final = "samples"
"""Name of the folder of kept samples in the folder of a run that keeps them."""
GROUPS_AT_ONCE: Final = 64
"""Groups that are in memory, and in one transaction."""
NOT_IN_A_BATCH: Final = "not_in_a_batch"


class _Recorded(msgspec.Struct):
    """A group of the recorded run."""

    max_staleness: int
    record: GroupRecorded | None = None
    """Without payload."""
    closed: GroupClosed | None = None

    @property
    def oldest_version(self) -> int:
        """0 for a group without tokens."""
        notes = self.record.samples if self.record is not None else ()
        return min((note.oldest_version for note in notes if note.oldest_version is not None), default=0)


class RecordedBatches:
    """The batches of one run, found complete. Reads its ledger until it is closed."""

    def __init__(self, folder: Path, *, num_steps: int, groups_per_batch: int, vocab_size: int | None = None) -> None:
        """
        Args:
            folder: of the recorded run.
            num_steps: at most so many batches are wanted.
            groups_per_batch: of the new run.
            vocab_size: of the model of the new run; None: not known.

        Raises:
            UserFault: there is no batch, the batches are of another size, or samples are gone.
            LedgerStoreError: the ledger cannot be read.
        """
        self._folder = folder
        self._vocab_size = vocab_size
        self._groups: dict[int, _Recorded] = {}
        self._came: list[int] = []
        """Group ids in the order of their admission."""
        self._leases: list[BatchLeased] = []
        self._run: RunRecorded | None = None
        self._reader = _PayloadReader(folder / LEDGER_FILE)
        try:
            for entry in self._reader.entries():
                self._read(entry)
            self.run, self.batches = self._choose(num_steps, groups_per_batch)
            self._missing = self._find_missing()
        except BaseException:
            self._reader.close()
            raise

    def close(self) -> None:
        """Let go of the ledger."""
        self._reader.close()

    @property
    def num_groups(self) -> int:
        """In the batches."""
        return sum(len(batch.group_ids) for batch in self.batches)

    def entries(self) -> Iterator[list[LedgerEntry]]:
        """What the new ledger begins with, in parts of a bounded size.

        Raises:
            UserFault: a file of kept samples cannot be read, or a group has a token that the model does not know.
            LedgerStoreError: the ledger cannot be read.
        """
        yield [self.run, BatchesFixed(batches=self.batches, source=str(self._folder)), VersionRecorded(version=0)]
        bounds = self._bounds()
        yield from _in_parts(self._grants(bounds))
        yield from _in_parts(self._closed(bounds))
        yield from _in_parts(self._recorded(bounds))

    # --- what there is ----------------------------------------------------------------------------------------

    def _read(self, entry: LedgerEntry) -> None:
        match entry:
            case RunRecorded():
                self._run = entry
            case GroupsGranted():
                first = entry.span.first_group
                for group_id in range(first, first + entry.span.num_groups):
                    self._groups[group_id] = _Recorded(entry.max_staleness)
            case GroupRecorded():
                self._groups[entry.group_id].record = msgspec.structs.replace(entry, payload=None)
                self._came.append(entry.group_id)
            case GroupClosed():
                self._groups[entry.group_id].closed = entry
            case BatchLeased():
                self._leases.append(entry)
            case BatchesFixed():
                raise UserFault(
                    f"{self._folder} trains batches of {entry.source} itself; take them from there (--from)"
                )
            case _:
                pass

    def _choose(self, num_steps: int, groups_per_batch: int) -> tuple[RunRecorded, tuple[BatchLeased, ...]]:
        if self._run is None:
            raise UserFault(f"{self._folder}: its ledger is empty; the run ended before anything was generated")
        if not self._leases:
            formed = self._form(groups_per_batch)[:num_steps]
            if not formed:
                raise UserFault(f"{self._folder}: no batch and no complete group was recorded")
            return msgspec.structs.replace(self._run, groups_per_batch=groups_per_batch), tuple(formed)
        recorded = self._run.groups_per_batch
        if recorded != groups_per_batch:
            raise UserFault(
                f"learner.groups_per_batch is {groups_per_batch}, and the batches of {self._folder} have {recorded} "
                f"groups; they are trained as they were, so set it to {recorded}"
            )
        return self._run, tuple(self._leases[:num_steps])

    def _form(self, groups_per_batch: int) -> list[BatchLeased]:
        """Batches of groups that were collected and wait."""
        ids = [group_id for group_id in self._came if self._groups[group_id].closed is None]
        batches: list[BatchLeased] = []
        for version, start in enumerate(range(0, len(ids), groups_per_batch), start=1):
            members = tuple(ids[start : start + groups_per_batch])
            oldest = min(self._groups[group_id].oldest_version for group_id in members)
            batches.append(
                BatchLeased(
                    version=version,
                    group_ids=members,
                    max_staleness=max(0, version - 1 - oldest),
                    update_mode=UpdateMode.DRAIN,
                )
            )
        return batches

    def _find_missing(self) -> dict[Path, list[int]]:
        """The versions that have to be read from files of kept samples, by file.

        Raises:
            UserFault: samples are in neither place.
        """
        kept, files = self._reader.payload_ids(), archived_steps(self._folder / SAMPLES_FOLDER)
        missing: dict[Path, list[int]] = {}
        gone: list[int] = []
        for batch in self.batches:
            if kept.issuperset(batch.group_ids):
                continue
            if batch.version in files:
                missing.setdefault(files[batch.version], []).append(batch.version)
            else:
                gone.append(batch.version)
        if gone:
            raise UserFault(
                f"{self._folder}: the samples of {_named(gone)} are gone: a run lets go of them when no checkpoint "
                "needs them any more, and this one did not keep them. Run what is to be trained again with "
                "--keep-samples (run.keep_samples=true)"
            )
        return missing

    # --- what is written --------------------------------------------------------------------------------------

    def _bounds(self) -> dict[int, int]:
        """η of every group up to the last one of the batches: as granted, or its age in the batch where that is more,
        as with groups that were collected by one version."""
        bounds = {group_id: group.max_staleness for group_id, group in self._groups.items()}
        used: set[int] = set()
        for batch in self.batches:
            for group_id in batch.group_ids:
                age = batch.version - 1 - self._groups[group_id].oldest_version
                bounds[group_id] = max(bounds[group_id], age)
                used.add(group_id)
        return {group_id: bounds[group_id] for group_id in range(max(used) + 1)}

    def _grants(self, bounds: dict[int, int]) -> Iterator[LedgerEntry]:
        for bound, ids in groupby(bounds, key=bounds.__getitem__):
            members = list(ids)
            span = GrantSpan(members[0], len(members), members[0], 0, bound)
            yield GroupsGranted(span=span, total=members[-1] + 1, max_staleness=bound)

    def _closed(self, bounds: dict[int, int]) -> Iterator[LedgerEntry]:
        used = {group_id for batch in self.batches for group_id in batch.group_ids}
        for group_id in bounds:
            if group_id not in used:
                group = self._groups[group_id]
                yield GroupClosed(group_id=group_id, ended=group.closed.ended if group.closed else self._ends(group_id))

    def _ends(self, group_id: int) -> tuple[SampleEnd, ...]:
        record = self._groups[group_id].record
        indices = dict.fromkeys(range(self.run.samples_per_group), (0, 0))
        if record is not None:
            indices = {note.index: (note.num_tokens, note.num_given_tokens) for note in record.samples}
        cancelled = tuple(
            SampleEnd(
                key=SampleKey(group_id, index),
                state=TerminalState.CANCELLED,
                cause=NOT_IN_A_BATCH,
                num_tokens=num_tokens,
                num_given_tokens=num_given,
            )
            for index, (num_tokens, num_given) in indices.items()
        )
        return cancelled if record is None else (*cancelled, *record.ended)

    def _recorded(self, bounds: dict[int, int]) -> Iterator[LedgerEntry]:
        archived = {version for versions in self._missing.values() for version in versions}
        written: set[int] = set()  # a group may be in several batches

        def new(group_ids: tuple[int, ...]) -> list[int]:
            found = [group_id for group_id in group_ids if group_id not in written]
            written.update(found)
            return found

        for batch in self.batches:
            if batch.version not in archived:
                for group_id in new(batch.group_ids):
                    (group,) = self._reader.payloads((group_id,))
                    yield self._entry(group, bounds[group_id])
        for file, versions in self._missing.items():
            for group in read_archived(file, versions):
                if not new((group.group_id,)):
                    continue
                record = self._groups[group.group_id].record
                assert record is not None, "a group in a batch was admitted"
                yield self._entry(msgspec.structs.replace(group, ended=record.ended), bounds[group.group_id])

    def _entry(self, group: Group, bound: int) -> GroupRecorded:
        recorded = self._groups[group.group_id]
        largest = _largest_token(group)
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise UserFault(
                f"{self._folder}: group {group.group_id} has the token {largest}, and the model of this scenario knows "
                f"{self._vocab_size}: they were made with another tokenizer; set model.path to a model that has it"
            )
        assert recorded.record is not None, "a group in a batch was admitted"
        deadline = max(bound, recorded.oldest_version + bound)
        return msgspec.structs.replace(recorded.record, deadline_version=deadline, payload=group)


class _PayloadReader(SqliteReader):
    def payload_ids(self) -> set[int]:
        """Groups whose samples are in the ledger."""
        with self._named("read"):
            return {row[0] for row in self._database.execute("SELECT group_id FROM payloads")}


def _largest_token(group: Group) -> int:
    texts = [group.prompt.tokens]
    for sample in group.samples:
        for part in sample.parts:
            texts += [part.tokens, part.context_tokens]
    return max((int(np.frombuffer(text, dtype="<i4").max()) for text in texts if text), default=0)


def _in_parts(entries: Iterable[LedgerEntry]) -> Iterator[list[LedgerEntry]]:
    part: list[LedgerEntry] = []
    for entry in entries:
        part.append(entry)
        if len(part) == GROUPS_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _named(versions: Sequence[int]) -> str:
    """``batch 3``, ``batches 1 to 40``, ``batches 1, 2, 7, …``."""
    if len(versions) == 1:
        return f"batch {versions[0]}"
    if all(after == before + 1 for before, after in pairwise(versions)):
        return f"batches {versions[0]} to {versions[-1]}"
    shown = ", ".join(map(str, versions[:8]))
    return f"batches {shown}{', …' if len(versions) > 8 else ''}"
