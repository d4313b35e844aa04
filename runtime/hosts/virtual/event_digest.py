"""A virtual run as one number: everything that any actor handled, in order, and everything that was recorded.

Invariants:

* The digest depends on when which event reached whom from whom, and on every byte of the ledger; on nothing else: not
  on hash seeds, not on the machine.
* Responses are hashed once, where they are recorded, and not at every station on their way.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header

EVENTS_PER_FLUSH: Final = 4096


class EventDigest:
    """A running BLAKE2b digest."""

    def __init__(self) -> None:
        self._num_flushed = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._encoder = msgspec.msgpack.Encoder()
        self._rows: list[tuple[float, str, int, str, str, int]] = []

    @property
    def num_events(self) -> int:
        return self._num_flushed + len(self._rows)

    def add(self, at_s: float, name: str, epoch: int, header: Header | None, event: Event) -> None:
        """One event that reached an actor; the header is None for what came from its own process."""
        rows, what = self._rows, type(event).__name__
        if header is None:
            rows.append((at_s, name, epoch, what, "", 0))
        else:
            rows.append((at_s, name, epoch, what, header.sender, header.message_id))
        if len(rows) >= EVENTS_PER_FLUSH:
            self._flush()

    def record(self, entries: Sequence[LedgerEntry]) -> None:
        """These entries became durable."""
        self._flush()
        self._hash.update(self._encoder.encode(entries))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._num_flushed += len(rows)
        self._hash.update(self._encoder.encode(rows))
