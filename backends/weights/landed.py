"""The bytes of one publish in this process, while they come and afterwards, and the service that passes them on.

Invariants:

* A piece is passed on only when it is here and has its digest; nobody writes into it from then on.
* What is asked for and comes yet is answered when it is here; whoever asks decides how long it waits.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.weights.digest import PIECE_BYTES
from penstock.backends.weights.keyed_service import Client, KeyedService
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.service_messages import Changed, Piece, Read, ReadChanges, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.weights.service_messages import PublishId

MAX_WAITING: Final = 512
"""Requests that wait for pieces: more than all that may ask one engine have under way."""
MAX_REQUEST_BYTES: Final = 1 << 16

_requests: Final[msgspec.msgpack.Decoder[Read | ReadChanges]] = msgspec.msgpack.Decoder(Read | ReadChanges)


class KeptChanges(NamedTuple):
    """What a piece was made of, as it came."""

    reply: Changed
    frame: bytes


class Landed:
    """The bytes of one publish."""

    def __init__(self, publish: PublishId, size_bytes: int) -> None:
        self.publish = publish
        self.digest = ""
        """Of the bytes, once they are there."""
        self.since: PublishId | None = None
        """Of whose bytes these are made."""
        self.here: set[int] = set()
        """Where the pieces begin that are here and right."""
        self.changes: dict[int, KeptChanges] = {}
        """What some of them were made of, by where they begin."""
        self._descriptor = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)  # no room is an error here, and no SIGBUS later
            self.mapping = mmap.mmap(self._descriptor, size_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise WeightFetchError(
                f"there is no memory for version {publish.version} ({size_bytes:,} bytes): {error.strerror}"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)

    def opened(self) -> int:
        """Another descriptor of it, which keeps the bytes for as long as it is open."""
        return os.dup(self._descriptor)

    def piece(self, start: int) -> memoryview[int]:
        """The piece that begins there, in place."""
        return memoryview(self.mapping)[start : start + PIECE_BYTES]

    def is_whole(self, digest: str) -> None:
        """Everything is here."""
        self.digest = digest
        self.here.update(range(0, len(self.mapping), PIECE_BYTES))


class PieceService(KeyedService[Read | ReadChanges]):
    """Passes on what this process has, from here on until ``close``."""

    def __init__(self, host: str, find: Callable[[PublishId], Landed | None]) -> None:
        """
        Args:
            host: this machine's address as other engines see it.
            find: gives what is here of a publish, or None where it may come yet; raises WeightFetchError where it is
                not here any more. Called on the thread of the service.

        Raises:
            ServiceOpenError: it cannot listen there.
        """
        self._find = find
        self._waiting: list[tuple[Client, Read | ReadChanges]] = []
        self.num_bytes = 0
        """Passed on so far."""
        super().__init__(host, _requests, name="weights-passed-on", max_request_bytes=MAX_REQUEST_BYTES)
        self._start()

    def look_again(self) -> None:
        """There is more now; from any thread."""
        self._ring()

    def _carry_out(self, request: Read | ReadChanges, client: Client) -> None:
        if self._is_answered(client, request):
            return
        if len(self._waiting) >= MAX_WAITING:
            raise WeightFetchError("too many wait already")
        self._waiting.append((client, request))

    def _rung(self) -> None:
        waiting, self._waiting = self._waiting, []
        for client, request in waiting:
            try:
                if not self._is_answered(client, request):
                    self._waiting.append((client, request))
            except WeightFetchError as error:
                self._send(client, Refused(story=str(error)))

    def _is_answered(self, client: Client, request: Read | ReadChanges) -> bool:
        landed = self._find(request.publish)
        if landed is None:
            return False
        start, size_bytes = request.start, len(landed.mapping)
        if not 0 <= start < size_bytes or start % PIECE_BYTES or request.size_bytes != len(landed.piece(start)):
            raise WeightFetchError(f"bytes {start} to {start + request.size_bytes} are no piece")
        if start not in landed.here:
            return False
        kept = landed.changes.get(start)
        if isinstance(request, ReadChanges):
            if request.since != landed.since:
                raise WeightFetchError("this engine had another version before, and knows no changes since that one")
            if kept is not None:
                self._pass_on(client, kept.reply, kept.frame)
                return True
        self._pass_on(client, Piece(), landed.piece(start))
        return True

    def _pass_on(self, client: Client, reply: Piece | Changed, data: memoryview[int] | bytes) -> None:
        self._send(client, reply, data)
        self.num_bytes += len(data)
