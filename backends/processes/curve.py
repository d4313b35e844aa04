"""Keys of ZeroMQ sockets (CURVE), and who may connect: ZeroMQ asks a handler about every handshake (RFC 27, ZAP).

Invariants of the handler:

* Only the one client key that it was made with is admitted to the sockets that it guards.
* The thread ends with ``close`` and for no other reason: an exception in it would leave every later handshake
  without an answer, and nobody would hear of it.
"""

from __future__ import annotations

import threading
from typing import Final

import zmq
from zmq.utils import z85

from penstock.messages.base import Value

PIECE_BYTES: Final = 1 << 20
"""Of one frame on the wire. ZeroMQ cuts the connection of whoever announces more than ``MAX_WIRE_BYTES``, before it
takes memory for it, so a receiver with that limit sets no more aside for somebody who has not shown the key yet."""
ENVELOPE_BYTES: Final = 1024
"""More than ZeroMQ puts around a piece when it encrypts it, and more than any step of a handshake takes."""
MAX_WIRE_BYTES: Final = PIECE_BYTES + ENVELOPE_BYTES
ZERO_COPY_BYTES: Final = 256 * 1024
"""From this size on it is cheaper to lend bytes to ZeroMQ than to copy them."""
_ENDPOINT: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"penstock"
_VERSION: Final = b"1.0"
_STOP: Final = b"stop"
_NUM_CURVE_FIELDS: Final = 7

AnySocket = zmq.Socket[bytes]


class KeyPair(Value, frozen=True):
    """A CURVE key pair, Z85-encoded."""

    public: bytes
    secret: bytes


def make_keys() -> KeyPair:
    """A pair that nobody has seen before."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public, secret)


def show_keys(socket: AnySocket, own: KeyPair, server_key: bytes) -> None:
    """Have a socket that will connect show its own key, and talk to nobody but who has this server key."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = own.public, own.secret, server_key


def bind_at(socket: AnySocket, host: str) -> str:
    """Bind to a free port of this address and no other; the endpoint to connect to.

    Raises:
        zmq.ZMQError: this machine has no such address.
    """
    socket.ipv6 = ":" in host
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def pieces_of(data: bytes) -> list[memoryview]:
    """What to send as the parts of one message, which a receiver gets all together or not at all."""
    whole = memoryview(data)
    return [whole[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


class ZapHandler:
    """Answers the handshakes of one context, on a thread of its own."""

    def __init__(self, context: zmq.Context[AnySocket], *, admitted: bytes) -> None:
        """Serves from here on.

        Args:
            context: of the sockets that ``guard`` is called with.
            admitted: the one client key (public, Z85) that gets in.
        """
        self.num_refused = 0
        """Handshakes of clients without the key."""
        self._context = context
        self._admitted = z85.decode(admitted)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self._thread.start()

    def guard(self, socket: AnySocket) -> bytes:
        """Let nobody else connect to a socket that will be bound; its new server key (public, Z85)."""
        keys = make_keys()
        socket.curve_server, socket.curve_secretkey, socket.zap_domain = True, keys.secret, _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handler: nobody gets in, instead of everybody
        return keys.public

    def _serve(self) -> None:
        """Owns the socket from the start of the thread on."""
        while True:
            frames = self._socket.recv_multipart()
            if frames == [_STOP]:
                break
            self._socket.send_multipart(self._answer(frames))
        self._socket.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Request: version, id, domain, address, identity, mechanism, key. Never raises."""
        request_id = frames[1] if len(frames) > 1 else b""
        is_admitted = (
            len(frames) == _NUM_CURVE_FIELDS
            and frames[0] == _VERSION
            and frames[2] == _DOMAIN
            and frames[5] == b"CURVE"
            and frames[6] == self._admitted
        )
        if is_admitted:
            return [_VERSION, request_id, b"200", b"OK", b"penstock", b""]
        self.num_refused += 1
        return [_VERSION, request_id, b"400", b"not the key that is admitted here", b"", b""]

    def close(self) -> None:
        """End the thread. The context can be terminated afterwards."""
        ask = self._context.socket(zmq.REQ)
        ask.linger = 0
        ask.connect(_ENDPOINT)
        ask.send(_STOP)
        self._thread.join(timeout=5.0)
        ask.close(0)
