"""A ledger in memory: survives its handles, not its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.stores.protocol import StaleEpochError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.messages.ledger import LedgerEntry


class MemoryLedger:
    """What handles of one ledger share."""

    def __init__(self) -> None:
        self.epoch = -1
        self.entries: list[LedgerEntry] = []


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
        self._ledger.entries.extend(entries)

    def entries(self) -> Iterator[LedgerEntry]:
        """All entries, oldest first."""
        return iter(tuple(self._ledger.entries))

    def close(self) -> None:
        """Let go of the ledger; others may hold it."""
        self._epoch = None
