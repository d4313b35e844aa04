"""The line between the launcher of a worker group and the launcher of one of its further nodes: ZeroMQ with CURVE.

Invariants:

* Words arrive whole, in order, each once, or the line is down, for good: a PAIR socket has one peer at a time, and none
  of ours looks for another. What comes after a gap would be worth nothing.
* Only who has the keys of this worker group is taken for the other end, by either of them, and what is said is
  encrypted.
* ``send`` and ``receive`` never wait. What the network does not take stays with ZeroMQ.
* ZeroMQ's own thread says every moment that this process lives, also between the pieces of a large word. A line that is
  silent for longer than its limit is down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import zmq

from penstock.backends.processes.curve import (
    MAX_WIRE_BYTES,
    ZERO_COPY_BYTES,
    AnySocket,
    KeyPair,
    ZapHandler,
    bind_at,
    make_keys,
    pieces_of,
    show_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAT_MS: Final = 500
HANDSHAKE_MS: Final = 5000
_NUMBER_BYTES: Final = 8


class LineClosedError(OSError):
    """The line is down."""


class NodeLine:
    """One end of the line. One thread uses it."""

    def __init__(self, context: zmq.Context[AnySocket], timeout_s: float) -> None:
        """Leads nowhere yet.

        Args:
            context: of the socket.
            timeout_s: how long the line may be silent.
        """
        self.socket = context.socket(zmq.PAIR)
        """For a poller: readable when there is something to ``receive``."""
        self.peer_host = ""
        """The other end's address, as this end sees it, once it has said something."""
        self._timeout_s = timeout_s
        self._num_sent = self._num_received = 0
        self.socket.linger = self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = BEAT_MS, int(timeout_s * 1000)
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.maxmsgsize = MAX_WIRE_BYTES
        self.socket.reconnect_ivl = -1
        self.socket.immediate = True  # what cannot be sent now, because nobody is there, is not kept for later

    @property
    def is_up(self) -> bool:
        """Whether the other end is there."""
        return bool(self.socket.poll(0, zmq.POLLOUT))

    def send(self, data: bytes) -> None:
        """Send a word.

        Raises:
            LineClosedError: the line is down.
        """
        parts: list[bytes | memoryview] = [self._num_sent.to_bytes(_NUMBER_BYTES, "little"), *pieces_of(data)]
        self._num_sent += 1
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=len(data) < ZERO_COPY_BYTES)
        except zmq.Again:
            raise self.closed() from None

    def receive(self) -> Iterator[bytes]:
        """The words that have come, also those from before the line went down.

        Raises:
            LineClosedError: there is a gap.
        """
        while self.socket.poll(0):
            number, *pieces = self.socket.recv_multipart(copy=False)
            # CURVE refuses what is changed or repeated, but not what follows something that was left out.
            if int.from_bytes(number.bytes, "little") != self._num_received:
                raise LineClosedError("something that was said on the line is missing")
            self._num_received += 1
            self.peer_host = cast("str", number.get("Peer-Address"))
            yield b"".join(piece.buffer for piece in pieces)

    def closed(self) -> LineClosedError:
        """What to say of a line that is down."""
        return LineClosedError(f"the line has closed, or was silent for {self._timeout_s:g} s")


class Invitation(NamedTuple):
    """What the other end of a line has to know."""

    endpoint: str
    secret: str
    """The keys."""


class LinesToNodes:
    """Makes the launcher's ends."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """
        Args:
            host: address of this machine that the nodes can reach.
            timeout_s: how long a line may be silent.
        """
        self._host, self._timeout_s = host, timeout_s
        self._context: zmq.Context[AnySocket] = zmq.Context()
        self._node_keys = make_keys()
        self._zap = ZapHandler(self._context, admitted=self._node_keys.public)

    def open(self) -> tuple[NodeLine, Invitation]:
        """A line that waits for its other end.

        Raises:
            zmq.ZMQError: this machine has no such address.
        """
        line = NodeLine(self._context, self._timeout_s)
        keys = self._zap.guard(line.socket), self._node_keys.public, self._node_keys.secret
        return line, Invitation(bind_at(line.socket, self._host), b" ".join(keys).decode())

    def close(self) -> None:
        """All of them; the other ends notice."""
        self._zap.close()
        self._context.destroy(linger=0)


def line_to_launcher(invitation: Invitation, timeout_s: float, *, wait_s: float) -> NodeLine:
    """The node's end.

    Args:
        invitation: of the launcher.
        timeout_s: how long the line may be silent.
        wait_s: for the launcher to take it.

    Raises:
        LineClosedError: it has not.
    """
    server_key, public, secret = invitation.secret.encode().split()
    line = NodeLine(zmq.Context(), timeout_s)
    show_keys(line.socket, KeyPair(public, secret), server_key)
    line.socket.ipv6 = "[" in invitation.endpoint
    line.socket.connect(invitation.endpoint)
    if not line.socket.poll(int(wait_s * 1000), zmq.POLLOUT):
        raise LineClosedError(f"the learner's process has not taken this node's line within {wait_s:g} s")
    return line
