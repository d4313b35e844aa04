"""Where the ledger's entries are kept.

Invariants:

* Entries are in the order in which they were committed, and a commit is whole or did not happen.
* What ``commit`` has returned for is there after any crash that the store survives (a process for memory, the
  machine for a file).
* Only the newest claimant writes. A Buffer that was given up and wakes again has an older epoch and is refused.
* The payload of a group stays until the group is closed, or a ``PayloadsReleased`` covers the batch that trained it
  first and does not name it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.messages.books import BooksSnapshot, KeptBooks
    from penstock.messages.ledger import LedgerEntry, StepRecorded
    from penstock.messages.samples import Group


class LedgerStoreError(RuntimeError):
    """The ledger could not be written or read. What was being committed is not in it."""


class PayloadGoneError(LedgerStoreError):
    """The payload that was asked for was never recorded, or has been released."""


class StaleEpochError(LedgerStoreError):
    """Another incarnation has claimed the ledger, or this one never did."""


class LedgerReader(Protocol):
    """A handle that reads. One thread at a time uses it."""

    def entries(self) -> Iterable[LedgerEntry]:
        """All entries, oldest first; with the payloads of those groups that have neither been trained nor closed, and
        without those of the others.

        Raises:
            LedgerStoreError: the ledger cannot be read; raised while iterating.
        """
        ...

    def payloads(self, group_ids: Sequence[int]) -> tuple[Group, ...]:
        """The payloads of these groups, in this order.

        Raises:
            PayloadGoneError: one was never recorded or has been released.
            LedgerStoreError: one cannot be read.
        """
        ...

    def receipts(self, first_version: int, last_version: int) -> tuple[StepRecorded, ...]:
        """The recorded steps that made these versions, ascending.

        Raises:
            LedgerStoreError: the ledger cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of it. May be called more than once."""
        ...


class LedgerStore(LedgerReader, Protocol):
    """One incarnation's handle on a ledger. Reading needs no claim."""

    def claim(self, epoch: int) -> None:
        """Become the only writer, from here on.

        Raises:
            StaleEpochError: the ledger was claimed with this epoch or a higher one.
        """
        ...

    def kept_books(self) -> KeptBooks:
        """The newest snapshot of the Buffer's books, and the entries since; see ``entries`` for their payloads.

        Raises:
            LedgerStoreError: the ledger cannot be read; raised while iterating too.
        """
        ...

    def commit(
        self, entries: Sequence[LedgerEntry], snapshot: Callable[[], BooksSnapshot | None] | None = None
    ) -> None:
        """Append these entries, all or none; they are durable on return.

        Args:
            entries: oldest first.
            snapshot: of the books that these entries lead to; called where it is time for one to be kept with them.

        Raises:
            StaleEpochError: this handle is not the newest claimant.
            LedgerStoreError: they could not be written.
        """
        ...

    def reader(self) -> LedgerReader:
        """A handle of its own on the same ledger, for another thread.

        Raises:
            LedgerStoreError: it cannot be opened.
        """
        ...
