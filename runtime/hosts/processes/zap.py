"""Who may connect: ZeroMQ asks this handler about every handshake on an inbox of its context (RFC 27, ZAP).

Invariants:

* Only the client key of the run is admitted.
* The thread ends with ``close`` and for no other reason: an exception in it would leave every later handshake
  without an answer, and nobody would hear of it.
"""

from __future__ import annotations

import threading
from typing import Final

import zmq
from zmq.utils import z85

ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"penstock"
_VERSION: Final = b"1.0"
_STOP: Final = b"stop"
_NUM_CURVE_FIELDS: Final = 7


class ZapHandler:
    """Answers the handshakes of one context, on a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, admitted: bytes) -> None:
        """Serves from here on.

        Args:
            context: That of the inboxes; a handler must be there before the first of them is bound.
            admitted: The one client key (public, Z85) that gets in.
        """
        self.num_admitted = 0
        self.num_refused = 0
        self._context = context
        self._admitted = z85.decode(admitted)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self._thread.start()

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
            and frames[2] == DOMAIN
            and frames[5] == b"CURVE"
            and frames[6] == self._admitted
        )
        if is_admitted:
            self.num_admitted += 1
            return [_VERSION, request_id, b"200", b"OK", b"penstock", b""]
        self.num_refused += 1
        return [_VERSION, request_id, b"400", b"not a key of this run", b"", b""]

    def close(self) -> None:
        """End the thread. The context can be terminated afterwards."""
        ask = self._context.socket(zmq.REQ)
        ask.linger = 0
        ask.connect(ENDPOINT)
        ask.send(_STOP)
        self._thread.join(timeout=5.0)
        ask.close(0)
