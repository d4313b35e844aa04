"""Where the Learner stands, and which batch it is offered next.

Invariants:

* A Learner that has loaded nothing is offered nothing; it is told which checkpoint to load.
* The next batch of a Learner that stands at ``s`` is ``s + 1``. Up to the recorded version that is an old one, with the
  payloads of the ledger; after it the open one, or a new one.
* The Learner never stands before the newest checkpoint: it was told to load that one, or has written it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.training import BatchReady, CheckpointNamed

if TYPE_CHECKING:
    from penstock.actors.buffer.books import Books
    from penstock.messages.ledger import BatchLeased
    from penstock.messages.samples import Group


class LearnerSide:
    """The Buffer's picture of the Learner."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.stand: int | None = None
        """The version that the Learner stands at; None while it has loaded nothing."""
        self.waits = False
        """It stands at the newest version and has nothing to train."""
        self._offered = -1
        """Version of the batch that it was last offered, or that is being fetched for it."""

    @property
    def is_level(self) -> bool:
        """Whether it has trained all that is recorded."""
        return self.stand == self._books.version

    def started(self, epoch: int) -> CheckpointNamed:
        """A new incarnation has loaded nothing yet; what to tell it."""
        self.stand, self.waits, self._offered = None, False, -1
        books = self._books
        newest = books.checkpoints[-1] if books.checkpoints else None
        return CheckpointNamed(
            learner_epoch=epoch,
            version=0 if newest is None else newest.version,
            path="" if newest is None else newest.path,
            announced_version=-1 if books.announced is None else books.announced,
        )

    def stands_at(self, version: int) -> None:
        """It says so, with a receipt or at its start."""
        self.stand = max(version, self._books.checkpoint_version)
        self.waits, self._offered = self.is_level, -1

    def to_repeat(self) -> BatchLeased | None:
        """The recorded batch to be offered again now; it counts as offered from here on."""
        stand, books = self.stand, self._books
        if stand is None or self._offered == stand + 1:
            return None
        lease = books.leases.get(stand + 1)
        if lease is not None:
            self._offered = stand + 1
        return lease

    def offers(self, version: int) -> None:
        """This batch goes to it now."""
        self._offered, self.waits = version, False

    def wants(self, version: int) -> bool:
        """Whether this batch is the one to be offered."""
        return self._offered == version

    def batch(self, lease: BatchLeased, groups: tuple[Group, ...]) -> BatchReady:
        """The offer of a leased batch: the same whenever it is made, but for what is news."""
        return BatchReady(
            version=lease.version,
            groups=groups,
            announced_version=self._books.announced or 0,
            max_staleness=lease.max_staleness,
            mask_stale=lease.mask_stale,
            mask_old_tokens=lease.mask_old_tokens,
            update_mode=lease.update_mode,
            is_last=lease.is_last,
            num_waiting_groups=self._books.table.num_ready,
            uses=lease.uses,
        )
