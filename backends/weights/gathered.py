"""One publish gathered from the learner and from the engines that have it, or fetch it now, piece by piece.

Every piece is held to its digest as soon as it is here, and passed on from then on. The digests come from the learner,
and themselves have the manifest's digest. So bytes of another engine are as good as the learner's, or are not used.

Invariants:

* What another engine does not give, gives late or gives wrong comes from the learner, and the cause is told.
* Into a piece that is right nobody writes again.
* Grace: when the learner has given its part, the others have as long again, and ``LEAST_GRACE_S`` at least. So links on
  which the tree does not pay cost a publish twice its time at most, and their engines are soon asked no more.

| waits for | who ends it |
|---|---|
| the learner's next answer | the learner, the end of its line (which is made anew), or ``SILENCE_S`` |
| pieces of other engines | they, or the end of a line; at the latest the end of their grace |
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from penstock.backends.weights.digest import PIECE_BYTES, PIECE_DIGEST_BYTES, digest_of_pieces
from penstock.backends.weights.landed import KeptChanges
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pulled import (
    MAX_LINES,
    READS_UNDER_WAY,
    SILENCE_S,
    described,
    open_line,
    put_answer,
    story_of_the_break,
)
from penstock.backends.weights.service_messages import (
    AnyReply,
    Changed,
    Piece,
    Read,
    ReadChanges,
    ReadDigests,
    Refused,
    address_in,
    service_at,
)
from penstock.messages.base import UNREADABLE
from penstock.messages.weights import WeightDetour

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.backends.weights.landed import Landed
    from penstock.backends.weights.service_messages import AnyRead, ServiceAddress
    from penstock.messages.weights import WeightManifest, WeightSource

LEAST_GRACE_S: Final = 5.0
LEARNER: Final = "the learner"
_DIGESTS: Final = b"digests"
"""Id of that request; those of the others are numbers of eight bytes."""

_replies: Final = msgspec.msgpack.Decoder(AnyReply)


class _Server:
    """One that is asked for pieces."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: ServiceAddress, source: WeightSource | None
    ) -> None:
        self.source = source
        """None: it is the learner."""
        self.queue: deque[int] = deque()
        """Pieces to ask it for."""
        self.asked: dict[int, None] = {}
        self.heard_s = time.monotonic()
        self.num_lines = 0
        self._context, self._address = context, address
        self.open()

    def open(self) -> None:
        """A line to it, the first or another."""
        self.line = open_line(self._context, self._address)
        self.num_lines += 1

    def close(self) -> list[int]:
        """Ask it no more; the pieces that it was to give."""
        self.line.socket.disable_monitor()
        self.line.socket.close(0)
        left = [*self.asked, *self.queue]
        self.asked.clear()
        self.queue.clear()
        return left

    def ask(self, request_id: bytes, request: AnyRead) -> None:
        if not self.asked:
            self.heard_s = time.monotonic()
        self.line.ask(request_id, request)


class Gathering:
    """The pieces of one publish that are still missing."""

    def __init__(
        self, manifest: WeightManifest, landed: Landed, base: Landed | None, arrived: Callable[[], None]
    ) -> None:
        """
        Args:
            manifest: with its sources.
            landed: where they are to be; with ``base`` it holds the bytes of that.
            base: what this process had before.
            arrived: called whenever a piece is here.
        """
        self.detours: list[WeightDetour] = []
        self.learner_bytes = 0
        """That came from the learner."""
        self.peer_bytes = 0
        self._manifest = described(manifest)
        self._learner_address = address_in(manifest)
        self._landed, self._base, self._arrived = landed, base, arrived
        self._missing = dict.fromkeys(range(0, len(landed.mapping), PIECE_BYTES))
        self._digests = b""
        self._taken_whole: set[int] = set()
        """Pieces whose changes did not do."""
        self._suspects: dict[int, _Server] = {}
        """By piece: whose changes did not make what the learner has."""
        self._began_s = time.monotonic()
        self._grace_ends_s: float | None = None

    def run(self, own_names: Collection[str]) -> None:
        """Until nothing is missing.

        Args:
            own_names: of this process among the sources.

        Raises:
            WeightFetchError: the learner does not answer, has it no longer, or sent what the manifest does not
                describe.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._learner = _Server(context, self._learner_address, None)
            self._servers = [self._learner]
            self._fetch_digests()
            self._share_out(context, own_names)
            while self._missing:
                for server in self._servers:
                    self._ask(server)
                self._hear(self._wait_s())
                self._end_grace()
        finally:
            context.destroy(linger=0)

    # --- whom to ask ------------------------------------------------------------------------------------------

    def _fetch_digests(self) -> None:
        while not self._digests:
            self._learner.ask(_DIGESTS, ReadDigests(publish=self._landed.publish))
            self._hear(SILENCE_S)

    def _share_out(self, context: zmq.Context[zmq.Socket[bytes]], own_names: Collection[str]) -> None:
        queues: list[deque[int]] = []
        for source in self._manifest.sources:
            server = self._learner if source.engine in own_names else self._line_to(context, source)
            queues.append(server.queue)
        for index, start in enumerate(self._missing):
            queues[index % len(queues)].append(start)

    def _line_to(self, context: zmq.Context[zmq.Socket[bytes]], source: WeightSource) -> _Server:
        try:
            server = _Server(context, service_at(source.location), source)
        except (WeightFetchError, zmq.ZMQError):  # no location, or no address in it
            self.detours.append(WeightDetour(source.engine, source.epoch, "what is served there is no weights"))
            return self._learner
        self._servers.append(server)
        return server

    def _ask(self, server: _Server) -> None:
        while server.queue and len(server.asked) < READS_UNDER_WAY:
            start = server.queue.popleft()
            server.ask(start.to_bytes(8, "little"), self._request(start))
            server.asked[start] = None

    def _request(self, start: int) -> Read | ReadChanges:
        publish, size_bytes = self._landed.publish, len(self._landed.piece(start))
        if self._base is None or start in self._taken_whole:
            return Read(publish=publish, start=start, size_bytes=size_bytes)
        return ReadChanges(publish=publish, since=self._base.publish, start=start, size_bytes=size_bytes)

    def _wait_s(self) -> float:
        now_s, learner = time.monotonic(), self._learner
        if learner.asked:
            left_s = learner.heard_s + SILENCE_S - now_s
            if left_s <= 0:
                raise self._error(f"the learner's weight service has not answered for {SILENCE_S:g} s")
            return left_s
        if self._grace_ends_s is None:
            self._grace_ends_s = now_s + max(LEAST_GRACE_S, now_s - self._began_s)
        return max(0.0, self._grace_ends_s - now_s)

    def _end_grace(self) -> None:
        if self._learner.asked or self._grace_ends_s is None or time.monotonic() < self._grace_ends_s:
            return
        for server in self._servers[1:]:
            if server.asked or server.queue:
                self._give_up(server, f"it was {self._grace_ends_s - self._began_s:.0f} s late with its pieces")

    def _give_up(self, server: _Server, cause: str, *, is_wrong: bool = False) -> None:
        if server not in self._servers:
            return
        assert server.source is not None
        self._servers.remove(server)
        self._learner.queue.extend(server.close())
        self.detours.append(WeightDetour(server.source.engine, server.source.epoch, cause, is_wrong))

    # --- what comes -------------------------------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        for server in self._servers:
            poller.register(server.line.socket, zmq.POLLIN)
            poller.register(server.line.monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000) + 1))
        if not ready and not self._digests:
            raise self._error(f"the learner's weight service has not answered for {SILENCE_S:g} s")
        for server in list(self._servers):
            line = server.line
            if server not in self._servers:
                continue  # given up for what another has just sent
            if line.socket in ready:
                self._take(server, line.socket.recv_multipart())
            elif line.monitor in ready:
                self._on_break(server, line.event())

    def _on_break(self, server: _Server, event: int) -> None:
        if server.source is not None:
            self._give_up(server, "the connection to it broke, or it refused the key")
            return
        if event != zmq.EVENT_DISCONNECTED or server.num_lines == MAX_LINES:
            raise self._error(story_of_the_break(event))
        server.queue.extendleft(reversed(server.close()))
        server.open()

    def _take(self, server: _Server, frames: list[bytes]) -> None:
        server.heard_s = time.monotonic()
        try:
            reply = _replies.decode(frames[1])
        except (IndexError, *UNREADABLE):
            reply = None
        if isinstance(reply, Refused):
            self._on_refused(server, reply)
            return
        if server is self._learner and frames[0] == _DIGESTS:
            self._take_digests(reply, frames)
            return
        start = int.from_bytes(frames[0], "little")
        if reply is None or len(frames) != 3 or start not in server.asked:
            self._on_nonsense(server, "what came was no answer to anything that was asked")
            return
        del server.asked[start]
        self._fill(server, start, reply, frames[2])

    def _take_digests(self, reply: AnyReply | None, frames: list[bytes]) -> None:
        is_right = isinstance(reply, Piece) and len(frames) == 3
        if not is_right or len(frames[2]) != len(self._missing) * PIECE_DIGEST_BYTES:
            raise self._error("asked for the digests of the pieces, got something else")
        if digest_of_pieces(frames[2]) != self._manifest.digest:
            raise self._error(f"the pieces of version {self._manifest.version} have another digest than was announced")
        self._digests = frames[2]

    def _on_refused(self, server: _Server, reply: Refused) -> None:
        if server.source is None:
            raise self._error(reply.story)
        self._servers.remove(server)
        self._learner.queue.extend(server.close())  # no fault: it has let go of it, or had another version before

    def _on_nonsense(self, server: _Server, cause: str) -> None:
        if server.source is None:
            raise self._error(cause)
        self._give_up(server, cause, is_wrong=True)

    def _fill(self, server: _Server, start: int, reply: AnyReply, frame: bytes) -> None:
        place, takes_changes = self._landed.piece(start), self._base is not None and start not in self._taken_whole
        try:
            put_answer(place, reply, frame, takes_changes=takes_changes)
            is_right = hashlib.sha256(place).digest() == self._digest_at(start)
        except ValueError:
            is_right = False
        if not is_right:
            self._on_wrong(server, start, reply)
            return
        if (suspect := self._suspects.pop(start, None)) is not None:
            self._give_up(suspect, WRONG, is_wrong=True)
        if isinstance(reply, Changed):
            self._landed.changes[start] = KeptChanges(reply, frame)
        if server.source is None:
            self.learner_bytes += len(frame)
        else:
            self.peer_bytes += len(frame)
        self._landed.here.add(start)
        del self._missing[start]
        self._arrived()

    def _on_wrong(self, server: _Server, start: int, reply: AnyReply) -> None:
        if self._base is not None:
            self._landed.piece(start)[:] = self._base.piece(start)
        self._learner.queue.append(start)
        if server.source is not None and isinstance(reply, Changed):
            self._suspects[start] = server  # or what they were laid over is wrong here
        elif server.source is not None:
            self._give_up(server, WRONG, is_wrong=True)
        elif isinstance(reply, Changed):
            self._suspects.pop(start, None)
            self._taken_whole.add(start)
        else:
            raise self._error(
                f"bytes {start} on of version {self._manifest.version} have another digest than the learner announced; "
                "they were changed on the way"
            )

    def _digest_at(self, start: int) -> bytes:
        place = start // PIECE_BYTES * PIECE_DIGEST_BYTES
        return self._digests[place : place + PIECE_DIGEST_BYTES]

    def _error(self, story: str) -> WeightFetchError:
        return WeightFetchError(f"{self._manifest.location}: {story}")


WRONG: Final = "its bytes are not the learner's"
