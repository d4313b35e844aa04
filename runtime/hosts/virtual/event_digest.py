"""A virtual run as one number: everything that any actor handled, in order.

Invariants:

* The digest depends on what was handled, when and by whom, and on nothing else: not on hash seeds, not on the machine.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.wire import Header

FLUSH_BYTES: Final = 1 << 18


class EventDigest:
    """A running BLAKE2b digest over all handled events."""

    def __init__(self) -> None:
        self.num_events = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def add(self, at_s: float, name: str, epoch: int, header: Header | None, event: Event) -> None:
        """One event that reached an actor; the header is None for what came from its own process."""
        self.num_events += 1
        buffer = self._buffer
        self._encoder.encode_into((at_s, name, epoch, header, event), buffer, -1)
        if len(buffer) > FLUSH_BYTES:
            self._hash.update(buffer)
            buffer.clear()

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        self._hash.update(self._buffer)
        self._buffer.clear()
        return self._hash.hexdigest()
