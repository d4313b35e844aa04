"""A ledger in memory: survives its handles, not its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.backends.stores.protocol import LedgerStoreError, StaleEpochError
from penstock.messages.ledger import BatchLeased, GroupClosed, GroupRecorded, PayloadsReleased, StepRecorded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Group


class MemoryLedger:
    """What handles of one ledger share."""

    def __init__(self) -> None:
        self.epoch = -1
        self.entries: list[LedgerEntry] = []
        """Without payloads."""
        self.payloads: dict[int, Group] = {}
        self.open: set[int] = set()
        """Groups with a payload that have neither been trained nor closed."""
        self.batches: dict[int, tuple[int, ...]] = {}
        """Groups of each batch whose payloads are here."""

    def append(self, entry: LedgerEntry) -> None:
        """Enter one record."""
        match entry:
            case GroupRecorded():
                if entry.payload is not None:
                    self.payloads[entry.group_id] = entry.payload
                self.open.add(entry.group_id)
                entry = msgspec.structs.replace(entry, payload=None)
            case GroupClosed():
                self.open.discard(entry.group_id)
                self.payloads.pop(entry.group_id, None)
            case BatchLeased():
                self.batches[entry.version] = entry.group_ids
            case StepRecorded():
                self.open.difference_update(entry.group_ids)
            case PayloadsReleased():
                for version in [version for version in self.batches if version <= entry.through_version]:
                    for group_id in self.batches.pop(version):
                        self.payloads.pop(group_id, None)
            case _:
                pass
        self.entries.append(entry)


class MemoryStore:
    """A handle on a :class:`MemoryLedger`; on one of its own unless it is given one."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._ledger = ledger or MemoryLedger()
        self._epoch: int | None = None

    def claim(self, epoch: int) -> None:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        if epoch <= self._ledger.epoch:
            raise StaleEpochError(
                f"the ledger is claimed with epoch {self._ledger.epoch}; epoch {epoch} is not above it"
            )
        self._ledger.epoch = self._epoch = epoch

    def commit(self, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        if self._epoch is None:
            raise StaleEpochError("the ledger was not claimed by this handle")
        if self._epoch != self._ledger.epoch:
            raise StaleEpochError(f"the ledger is claimed with epoch {self._ledger.epoch}; this is epoch {self._epoch}")
        for entry in entries:
            self._ledger.append(entry)

    def entries(self) -> Iterator[LedgerEntry]:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        ledger = self._ledger
        for entry in tuple(ledger.entries):
            if isinstance(entry, GroupRecorded) and entry.group_id in ledger.open:
                yield msgspec.structs.replace(entry, payload=ledger.payloads.get(entry.group_id))
            else:
                yield entry

    def payloads(self, group_ids: Sequence[int]) -> tuple[Group, ...]:
        """See :class:`~penstock.backends.stores.protocol.LedgerStore`."""
        missing = [group_id for group_id in group_ids if group_id not in self._ledger.payloads]
        if missing:
            raise LedgerStoreError(f"the ledger has no payloads of the groups {missing}: they were released")
        return tuple(self._ledger.payloads[group_id] for group_id in group_ids)

    def close(self) -> None:
        """Let go of the ledger; others may hold it."""
        self._epoch = None
