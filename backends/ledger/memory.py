"""A ledger in memory: survives its handles, not its process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.ledger.kept_books import decoded, encoded, with_payloads
from penstock.backends.ledger.protocol import PayloadGoneError, StaleEpochError
from penstock.messages.books import KeptBooks
from penstock.messages.ledger import EnginesRecorded, GroupClosed, GroupRecorded, PayloadsReleased, StepRecorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.messages.books import BooksSnapshot
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Group


class MemoryLedger:
    """What handles of one ledger share."""

    def __init__(self, *, is_brief: bool = False) -> None:
        """``is_brief``: nobody will read what the Buffer has written, as none follows it. So of the entries only those
        that name the engines stay, and receipts go with the payloads: a run of any length takes as much memory."""
        self.is_brief = is_brief
        self.num_left_out = 0
        """Entries that did not stay."""
        self.epoch = -1
        self.entries: list[LedgerEntry] = []
        """Without payloads."""
        self.open: dict[int, Group] = {}
        """Payloads of groups that are neither trained nor closed."""
        self.trained: dict[int, dict[int, Group]] = {}
        """Payloads of trained groups, by the version that they made first, and by group."""
        self.receipts: dict[int, StepRecorded] = {}
        self.snapshot_every = 0
        """Entries; 0: no snapshot is kept."""
        self.snapshot: tuple[int, bytes] = (0, b"")
        """The number of entries that it covers, and its bytes."""


class MemoryStore:
    """A handle on a :class:`MemoryLedger`; on one of its own unless it is given one."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._ledger = ledger or MemoryLedger()
        self._epoch: int | None = None

    def claim(self, epoch: int) -> None:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        if epoch <= self._ledger.epoch:
            raise StaleEpochError(
                f"the ledger is claimed with epoch {self._ledger.epoch}; epoch {epoch} is not above it"
            )
        self._ledger.epoch = self._epoch = epoch

    def kept_books(self) -> KeptBooks:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        sequence, body = self._ledger.snapshot
        found = decoded(sequence, body).snapshot if sequence else None
        snapshot = None if found is None else with_payloads(found, self._filled)
        return KeptBooks(snapshot, itertools.islice(self.entries(), sequence, None))

    def commit(
        self, entries: Sequence[LedgerEntry], snapshot: Callable[[], BooksSnapshot | None] | None = None
    ) -> None:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        ledger = self._ledger
        if self._epoch is None:
            raise StaleEpochError("the ledger was not claimed by this handle")
        if self._epoch != ledger.epoch:
            raise StaleEpochError(f"the ledger is claimed with epoch {ledger.epoch}; this is epoch {self._epoch}")
        for entry in entries:
            assert not isinstance(entry, GroupRecorded) or entry.payload is not None, "written without its payload"
        for entry in entries:
            kept = self._keep(entry)
            if ledger.is_brief and not isinstance(kept, EnginesRecorded):
                ledger.num_left_out += 1
            else:
                ledger.entries.append(kept)
        number = len(ledger.entries)
        is_due = ledger.snapshot_every and number - ledger.snapshot[0] >= ledger.snapshot_every
        if snapshot is not None and is_due and (books := snapshot()) is not None:
            ledger.snapshot = (number, encoded(books))

    def fill(self, entries: Iterable[LedgerEntry]) -> None:
        """Take what was read from another ledger; the payload of a group that has come to its end may be missing."""
        self._ledger.entries += map(self._keep, entries)

    def entries(self) -> Iterator[LedgerEntry]:
        """See :class:`~penstock.backends.ledger.protocol.LedgerReader`."""
        assert not self._ledger.num_left_out, "entries that were not kept cannot be read"
        for entry in tuple(self._ledger.entries):
            yield self._filled(entry) if isinstance(entry, GroupRecorded) else entry

    def payloads(self, group_ids: Sequence[int]) -> tuple[Group, ...]:
        """See :class:`~penstock.backends.ledger.protocol.LedgerReader`."""
        return tuple(self._payload(group_id) for group_id in group_ids)

    def receipts(self, first_version: int, last_version: int) -> tuple[StepRecorded, ...]:
        """See :class:`~penstock.backends.ledger.protocol.LedgerReader`."""
        receipts = self._ledger.receipts
        return tuple(receipts[version] for version in range(first_version, last_version + 1) if version in receipts)

    def reader(self) -> MemoryStore:
        """See :class:`~penstock.backends.ledger.protocol.LedgerStore`."""
        return MemoryStore(self._ledger)

    def close(self) -> None:
        """Let go of the ledger; others may hold it."""
        self._epoch = None

    def _keep(self, entry: LedgerEntry) -> LedgerEntry:
        """Do to the payloads what the entry says; returns what stays in the log."""
        ledger = self._ledger
        match entry:
            case GroupRecorded():
                if entry.payload is not None:
                    ledger.open[entry.group_id] = entry.payload
                return entry.without_payload()
            case GroupClosed():
                ledger.open.pop(entry.group_id, None)
            case StepRecorded():
                ledger.receipts[entry.version] = entry
                trained = ((group_id, ledger.open.pop(group_id, None)) for group_id in entry.group_ids)
                ledger.trained[entry.version] = {group_id: group for group_id, group in trained if group is not None}
            case PayloadsReleased():
                for version in [version for version in ledger.trained if version <= entry.through_version]:
                    groups = ledger.trained[version]
                    ledger.trained[version] = {g: groups[g] for g in entry.kept if g in groups}
                    if not ledger.trained[version]:
                        del ledger.trained[version]
                if ledger.is_brief:
                    for version in [version for version in ledger.receipts if version <= entry.through_version]:
                        del ledger.receipts[version]
            case _:
                pass
        return entry

    def _filled(self, entry: GroupRecorded) -> GroupRecorded:
        return msgspec.structs.replace(entry, payload=self._ledger.open.get(entry.group_id))

    def _payload(self, group_id: int) -> Group:
        if (group := self._ledger.open.get(group_id)) is not None:
            return group
        for groups in self._ledger.trained.values():
            if group_id in groups:
                return groups[group_id]
        raise PayloadGoneError(f"the payload of group {group_id} was never recorded or has been released")
