"""All sockets of one thread: an inbox that peers connect to, and one line out to each peer.

Invariants:

* A ``Links`` belongs to the thread that made it; ZeroMQ aborts the process when a socket is shared.
* Sending never blocks and never fails for a peer that is slow: there is no high-water mark. Grants bound the data.
* There is one line to a name. A peer at another endpoint, or with another key, gets a new line, and what waited on
  the old one is gone: delivery sends again what matters.
* With keys, nobody without the client key of the run gets past the handshake, and nobody who is not the peer that
  the directory names can pose as it.
* A frame travels in pieces of at most ``PIECE_BYTES``, which a receiver gets all together or not at all. ZeroMQ cuts
  the connection of whoever announces more, before it takes memory for it. So nobody who has not shown the key yet
  occupies more than one piece, and that for at most ``HANDSHAKE_MS``.

Lines have no routing id: of two peers with one id ZeroMQ mutes the later one, silently. Who speaks stands in the
header of every event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.backends.processes.curve import (
    ENVELOPE_BYTES,
    MAX_WIRE_BYTES,
    PIECE_BYTES,
    ZERO_COPY_BYTES,
    AnySocket,
    ZapHandler,
    bind_at,
    pieces_of,
    show_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.processes.curve import KeyPair
    from penstock.runtime.hosts.processes.control import Address

HEARTBEAT_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 3000
HEARTBEAT_TTL_MS: Final = 10_000
HANDSHAKE_MS: Final = 2000
RECONNECT_MS: Final = 20
RECONNECT_MAX_MS: Final = 1000
MAX_SOCKETS: Final = 65_000
MAX_REPLY_BYTES: Final = 256
"""Of what an inbox answers on the connection of a frame."""

_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINE_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class LineState(StrEnum):
    """What has become of the line to a peer."""

    UP = "up"
    DOWN = "down"
    """Cut, or silent for longer than ``HEARTBEAT_TIMEOUT_MS``; ZeroMQ tries again by itself."""
    REFUSED = "refused"
    """The handshake failed."""


class LineChange(NamedTuple):
    """News of one line."""

    peer: str
    state: LineState


class _Line(NamedTuple):
    socket: AnySocket
    monitor: AnySocket
    address: Address


class Links:
    """The sockets of one thread."""

    def __init__(
        self,
        *,
        client_keys: KeyPair | None,
        host: str = "127.0.0.1",
        has_inbox: bool = True,
        wakes_on_changes: bool = False,
    ) -> None:
        """Binds the inbox to a free port.

        Args:
            client_keys: The key pair of the run; None sends everything in the clear and admits everybody.
            host: Address of this machine that peers can reach.
            has_inbox: False for a thread that only sends.
            wakes_on_changes: Whether ``poller`` waits for news of the lines too. It then looks at one more socket a
                peer in every turn, so only who has to know at once asks for it.
        """
        self.context: zmq.Context[AnySocket] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.poller = zmq.Poller()
        self.num_down = 0
        """Lines that were cut, or silent for too long."""
        self.num_failed = 0
        """Handshakes that failed on the way out."""
        self.num_refused = 0
        """Handshakes that failed at the inbox: clients without the key of the run, or that broke off."""
        self.client_keys = client_keys
        self.host = host
        """Address of this machine as peers see it."""
        self._wakes_on_changes = wakes_on_changes
        self._lines: dict[str, _Line] = {}
        self._zap: ZapHandler | None = None
        self._inbox: AnySocket | None = None
        self._inbox_monitor: AnySocket | None = None
        self.endpoint = ""
        self.server_key = b""
        if has_inbox:
            self._bind(host)

    def _bind(self, host: str) -> None:
        inbox = self._inbox = self.context.socket(zmq.ROUTER)
        inbox.linger = inbox.rcvhwm = inbox.sndhwm = 0
        inbox.handshake_ivl = HANDSHAKE_MS
        inbox.maxmsgsize = MAX_WIRE_BYTES
        if self.client_keys is not None:
            self._zap = ZapHandler(self.context, admitted=self.client_keys.public)
            self.server_key = self._zap.guard(inbox)
        self._inbox_monitor = inbox.get_monitor_socket(_FAILED)
        self.endpoint = bind_at(inbox, host)
        self.poller.register(inbox, zmq.POLLIN)

    # --- lines out --------------------------------------------------------------------------------------------

    def connect(self, address: Address) -> None:
        """Open the line to a peer, in place of the one that was there."""
        line = self._lines.get(address.name)
        if line is not None and (line.address.endpoint, line.address.server_key) == (
            address.endpoint,
            address.server_key,
        ):
            self._lines[address.name] = line._replace(address=address)
            return
        self.disconnect(address.name)
        socket = self.context.socket(zmq.DEALER)
        socket.linger = socket.sndhwm = socket.rcvhwm = 0
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.heartbeat_ttl = HEARTBEAT_TTL_MS
        socket.handshake_ivl = HANDSHAKE_MS
        socket.maxmsgsize = MAX_REPLY_BYTES + ENVELOPE_BYTES
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        if self.client_keys is not None:
            show_keys(socket, self.client_keys, address.server_key)
        monitor = socket.get_monitor_socket(_LINE_EVENTS)
        if self._wakes_on_changes:
            self.poller.register(monitor, zmq.POLLIN)
        self._lines[address.name] = _Line(socket, monitor, address)
        socket.connect(address.endpoint)

    def disconnect(self, name: str) -> None:
        """Close the line to a peer, if there is one; what waits on it is dropped."""
        line = self._lines.pop(name, None)
        if line is not None:
            self._close(line, linger_ms=0)

    def _close(self, line: _Line, *, linger_ms: int) -> None:
        if self._wakes_on_changes:
            self.poller.unregister(line.monitor)
        line.socket.disable_monitor()
        line.monitor.close(0)
        line.socket.close(linger_ms)

    def address_of(self, name: str) -> Address | None:
        """Where the line to this peer leads, if there is one."""
        line = self._lines.get(name)
        return None if line is None else line.address

    def send(self, name: str, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ; False when there is no line to this peer."""
        line = self._lines.get(name)
        if line is None:
            return False
        if len(frame) <= PIECE_BYTES:
            line.socket.send(frame, zmq.NOBLOCK, copy=len(frame) < ZERO_COPY_BYTES)
        else:
            line.socket.send_multipart(pieces_of(frame), zmq.NOBLOCK, copy=False)
        return True

    def changes(self) -> list[LineChange]:
        """What has become of the lines since the last call."""
        found: list[LineChange] = []
        for name, line in self._lines.items():
            for event in _read(line.monitor):
                if event & _FAILED:
                    self.num_failed += 1
                    found.append(LineChange(name, LineState.REFUSED))
                elif event == zmq.EVENT_DISCONNECTED:
                    self.num_down += 1
                    found.append(LineChange(name, LineState.DOWN))
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    found.append(LineChange(name, LineState.UP))
        if self._inbox_monitor is not None:
            self.num_refused += sum(1 for _ in _read(self._inbox_monitor))
        return found

    # --- the inbox --------------------------------------------------------------------------------------------

    def receive(self, max_frames: int) -> list[tuple[bytes, bytes]]:
        """Up to so many frames that have arrived, each with the connection that it came by; never waits."""
        inbox, found = self._inbox, list[tuple[bytes, bytes]]()
        if inbox is None:
            return found
        for _ in range(max_frames):
            try:
                parts = inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            found.append((parts[0], parts[1] if len(parts) == 2 else b"".join(parts[1:])))
        return found

    def reply(self, connection: bytes, frame: bytes) -> None:
        """Answer on the connection that a frame came by; nothing happens when it is gone."""
        assert len(frame) <= MAX_REPLY_BYTES, "its line would be cut"
        if self._inbox is not None:
            self._inbox.send_multipart([connection, frame], zmq.NOBLOCK)

    def receive_reply(self, name: str) -> bytes | None:
        """A frame that the peer has sent back on its line, if there is one; never waits."""
        line = self._lines.get(name)
        if line is None:
            return None
        try:
            return line.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def socket_of(self, name: str) -> AnySocket:
        """The line to this peer, for a poller that waits for replies.

        Raises:
            KeyError: there is no line to this peer.
        """
        return self._lines[name].socket

    def close(self, *, linger_ms: int = 300) -> None:
        """Close everything; what is on its way has so long to leave."""
        for line in self._lines.values():
            self._close(line, linger_ms=linger_ms)
        self._lines.clear()
        if self._inbox is not None:
            self.poller.unregister(self._inbox)
            self._inbox.disable_monitor()
            if self._inbox_monitor is not None:
                self._inbox_monitor.close(0)
            self._inbox.close(0)
        if self._zap is not None:
            self._zap.close()
        self.context.term()


def _read(monitor: AnySocket) -> Iterator[int]:
    while True:
        try:
            message = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield int(parse_monitor_message(message)["event"])
