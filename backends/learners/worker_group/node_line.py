"""The line between the launcher of a worker group and the launcher of one of its further nodes: frames over TCP.

```
32 random bytes, each way; then frames:   length (8 bytes) ─ proof (32 bytes) ─ that many bytes
```

Invariants:

* Frames arrive whole, in order, each once, or the line closes: there is no second connection. What comes after a gap
  would be worth nothing.
* Only who has the secret of this worker group can make a frame: each carries a keyed digest of itself and of its
  number. The keys are made from the secret and the random bytes of both ends, so nothing of another line is taken for a
  frame of this one. Nothing is encrypted, as what the ranks say to each other is not.
* ``send``, ``write`` and ``read`` never wait. What the network does not take stays here until ``write``.

A line that is silent is no business of this class: ``heard_s`` says since when.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_FIRST_BYTES: Final = 64 << 10
"""Of the first frame: nobody has proved anything yet, so nobody makes this process set memory aside."""
MAX_FRAME_BYTES: Final = 64 << 30
_LENGTH: Final = struct.Struct("<Q")
_LAUNCHER: Final = b"launcher"
_NODE: Final = b"node"


class LineClosedError(OSError):
    """The other end is gone, or is not who it should be."""


class _Seal:
    """Makes the proofs of one direction."""

    def __init__(self, secret: bytes, nonces: bytes, who: bytes) -> None:
        self._key = hashlib.blake2b(nonces, key=secret, person=who, digest_size=32).digest()
        self._number = 0

    def proof_of(self, data: bytes | bytearray) -> bytes:
        """Of the next frame."""
        digest = hashlib.blake2b(_LENGTH.pack(self._number), key=self._key, digest_size=PROOF_BYTES)
        digest.update(data)
        self._number += 1
        return digest.digest()


class NodeLine:
    """One end of the line."""

    def __init__(self, connection: socket.socket, secret: bytes, *, is_launcher: bool) -> None:
        """
        Args:
            connection: TCP, connected; this object's from now on.
            secret: of the worker group, 32 to 64 bytes.
            is_launcher: which of the two ends this is.
        """
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._secret = secret
        self._is_launcher = is_launcher
        self._nonce = os.urandom(NONCE_BYTES)
        self._unsent: deque[memoryview] = deque([memoryview(self._nonce)])
        self._early: list[bytes] = []
        """Frames from before the other end's random bytes have come."""
        self._seal: _Seal | None = None
        self._parts = self._read_parts()
        self._part = bytearray(next(self._parts))
        self._num_read = 0
        self._frames: list[bytearray] = []
        self.heard_s = time.monotonic()
        """When anything last came."""

    def fileno(self) -> int:
        """For a selector."""
        return self._connection.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    @property
    def own_host(self) -> str:
        """The address of this machine that the line uses."""
        return str(self._connection.getsockname()[0])

    def send(self, data: bytes) -> None:
        """Send a frame, now or by ``write``.

        Raises:
            LineClosedError: the other end is gone.
        """
        if self._seal is None:
            self._early.append(data)
        else:
            self._enclose(self._seal, data)
        self.write()

    def write(self) -> None:
        """Send what is left, as much as the network takes now.

        Raises:
            LineClosedError: the other end is gone.
        """
        try:
            while self._unsent:
                num_sent = self._connection.send(self._unsent[0], socket.MSG_NOSIGNAL)
                if num_sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][num_sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LineClosedError(f"the line has closed: {error.strerror or error}") from error

    def read(self) -> list[bytearray]:
        """The frames that have come whole.

        Raises:
            LineClosedError: there will be none; or what came was made by somebody else.
        """
        try:
            while num_bytes := self._connection.recv_into(memoryview(self._part)[self._num_read :]):
                self.heard_s = time.monotonic()
                self._num_read += num_bytes
                while self._num_read == len(self._part):
                    self._part, self._num_read = bytearray(self._parts.send(self._part)), 0
        except BlockingIOError:
            frames, self._frames = self._frames, []
            return frames
        except LineClosedError:
            raise
        except OSError as error:
            raise LineClosedError(f"the line has closed: {error.strerror or error}") from error
        if self._frames:
            frames, self._frames = self._frames, []
            return frames  # the end is there the next time as well
        raise LineClosedError("the other end has closed the line")

    def finish(self) -> None:
        """Nothing more is sent. What was sent arrives only if this end goes on reading until the other closes: a TCP
        connection that is closed with something unread takes back what the peer has not read yet."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """The other end notices."""
        self._connection.close()

    def _read_parts(self) -> Generator[int, bytearray, None]:
        """Yields how many bytes come next and is sent them, for ever."""
        theirs = bytes((yield NONCE_BYTES))
        launcher, node = (self._nonce, theirs) if self._is_launcher else (theirs, self._nonce)
        mine, other = (_LAUNCHER, _NODE) if self._is_launcher else (_NODE, _LAUNCHER)
        self._seal = _Seal(self._secret, launcher + node, mine)
        for early in self._early:
            self._enclose(self._seal, early)
        self._early = []
        expected = _Seal(self._secret, launcher + node, other)
        limit = MAX_FIRST_BYTES
        while True:
            head = yield _LENGTH.size + PROOF_BYTES
            (length,) = _LENGTH.unpack_from(head)
            if not 0 < length <= limit:
                raise LineClosedError(f"the other end announced a frame of {length} bytes; at most {limit} are taken")
            data = yield length
            if not hmac.compare_digest(expected.proof_of(data), head[_LENGTH.size :]):
                raise LineClosedError("a frame was not made by the other end of this line")
            self._frames.append(data)
            limit = MAX_FRAME_BYTES

    def _enclose(self, seal: _Seal, data: bytes) -> None:
        self._unsent.append(memoryview(_LENGTH.pack(len(data)) + seal.proof_of(data)))
        self._unsent.append(memoryview(data))
