"""Where an operator's requests come in: a Unix domain socket in the run's folder, and what is said over it.

Invariants:

* Only processes of the run's own user are heard, and root: the kernel says who connects, and nobody else may open the
  socket's file.
* A connection brings one request, in one packet of at most ``MAX_BYTES``, and takes one answer. Both have deadlines.
* A request is said to the Buffer again until it is answered, so it outlives the Buffer that was asked first. Those that
  come later wait for it, or a repeat of it could undo them.
* A checkpoint that was promised is asked for until it is written, also when whoever asked waits no more: the next
  Buffer does not know of it.

| waits for | who ends it |
|---|---|
| the request of a connection | its sender; else ``REQUEST_S`` |
| the Buffer's answer | the Buffer, or its successor; else the sender's own time limit, and the end of the run |
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import zmq

from penstock.messages.base import UNREADABLE
from penstock.messages.operator import EnginesAsked, GrantsPaused, PolicyChanged, SaveAsked

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from penstock.messages.operator import OperatorAnswered, OperatorEvent

SOCKET_NAME: Final = "control.sock"
MAX_BYTES: Final = 64 * 1024
"""Of a request, and of an answer."""
MAX_OPEN: Final = 32
"""Connections at a time; whoever comes later is sent away."""
REQUEST_S: Final = 5.0
REPEAT_S: Final = 1.0
MAX_TIMEOUT_S: Final = 86400.0
_CREDENTIALS: Final = struct.Struct("3i")


class OperatorRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator's process says."""

    event: PolicyChanged | GrantsPaused | SaveAsked | EnginesAsked
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)]
    """Whoever asks waits so long for the answer."""


class CommandAnswer(msgspec.Struct, frozen=True):
    """What becomes of a request."""

    accepted: bool
    text: str
    """For people: what holds from here on, or why not."""


@contextlib.contextmanager
def socket_address(folder: Path) -> Generator[str]:
    """The address of the socket in a run's folder. It stays short in however deep a folder, as the kernel takes no
    more than 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


class _Connection:
    def __init__(self, peer: socket.socket, now_s: float) -> None:
        self.peer = peer
        self.event: OperatorEvent | None = None
        """Once it is there; with its number."""
        self.deadline_s = now_s + REQUEST_S
        self.next_s = now_s
        """When the Buffer is told again."""
        self.interim: OperatorAnswered | None = None

    def order(self) -> int:
        """Of its request among all."""
        return 0 if self.event is None else self.event.request

    def late(self) -> CommandAnswer:
        """What is said when time is up."""
        if self.interim is not None:
            return CommandAnswer(accepted=True, text=f"{self.interim.text}; it is not done yet")
        return CommandAnswer(
            accepted=False, text="the Buffer has not answered in time; penstock status tells whether it came to it"
        )


class OperatorDoor:
    """The run's side of it. For the supervisor's thread, which polls it."""

    def __init__(self, folder: Path, poller: zmq.Poller) -> None:
        """Listens; the run is alone in its folder, so what lies there is of an earlier drive."""
        self._folder, self._poller = folder, poller
        self._open: dict[int, _Connection] = {}
        self._num_requests = 0
        self._promised: OperatorEvent | None = None
        """The last request that was accepted, is not done, and whose asker waits no more. Its checkpoint is of every
        earlier one, too."""
        self._promised_next_s = 0.0
        (folder / SOCKET_NAME).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        with socket_address(folder) as address:
            self._listener.bind(address)
            (folder / SOCKET_NAME).chmod(0o600)
        self._listener.listen(MAX_OPEN)
        poller.register(self._listener.fileno(), zmq.POLLIN)

    def turn(self, now_s: float, tell: Callable[[OperatorEvent], None], *, ending: str) -> None:
        """Take what has come, tell the Buffer what is unanswered.

        Args:
            now_s: of the monotonic clock.
            tell: says something to the Buffer.
            ending: why the run takes no request any more; empty while it does.
        """
        self._accept(now_s)
        is_free = True
        for connection in sorted(self._open.values(), key=_Connection.order):
            if connection.event is None:
                self._hear(connection, now_s)
            elif ending:
                self._reply(connection, CommandAnswer(accepted=False, text=f"the run is ending: {ending}"))
            elif now_s >= connection.deadline_s:
                if connection.interim is not None:
                    self._promised = connection.event
                self._reply(connection, connection.late())
            else:
                if is_free and now_s >= connection.next_s:
                    connection.next_s = now_s + REPEAT_S
                    tell(connection.event)
                is_free = is_free and connection.interim is not None
        if self._promised is not None and not ending and now_s >= self._promised_next_s:
            self._promised_next_s = now_s + REPEAT_S
            tell(self._promised)

    def answered(self, answer: OperatorAnswered) -> None:
        """The Buffer has; nobody may wait any more."""
        if self._promised is not None and self._promised.request == answer.request and answer.is_final:
            self._promised = None
        for connection in list(self._open.values()):
            if connection.event is None or connection.event.request != answer.request:
                continue
            if answer.is_final:
                self._reply(connection, CommandAnswer(accepted=answer.accepted, text=answer.text))
            else:
                connection.interim = answer

    def close(self) -> None:
        """Hear nobody any more."""
        for connection in list(self._open.values()):
            self._drop(connection)
        self._poller.unregister(self._listener.fileno())
        self._listener.close()
        (self._folder / SOCKET_NAME).unlink(missing_ok=True)

    def _accept(self, now_s: float) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more; or it has hung up, or descriptors have run out
            while True:
                peer, _ = self._listener.accept()
                peer.setblocking(False)
                if len(self._open) >= MAX_OPEN or not _is_own(peer):
                    peer.close()
                    continue
                self._open[peer.fileno()] = _Connection(peer, now_s)
                self._poller.register(peer.fileno(), zmq.POLLIN)

    def _hear(self, connection: _Connection, now_s: float) -> None:
        try:
            data, _, flags, _ = connection.peer.recvmsg(MAX_BYTES)
        except BlockingIOError:
            if now_s >= connection.deadline_s:
                self._drop(connection)
            return
        except OSError:
            data, flags = b"", 0
        if not data:
            self._drop(connection)
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise msgspec.DecodeError(f"it has more than {MAX_BYTES} bytes")
            request = msgspec.msgpack.decode(data, type=OperatorRequest)
        except UNREADABLE as error:
            self._reply(connection, CommandAnswer(accepted=False, text=f"the request cannot be read: {error}"))
            return
        self._num_requests += 1
        connection.event = msgspec.structs.replace(request.event, request=self._num_requests)
        connection.deadline_s = now_s + request.timeout_s
        self._poller.unregister(connection.peer.fileno())  # nothing more is expected of it

    def _reply(self, connection: _Connection, answer: CommandAnswer) -> None:
        with contextlib.suppress(OSError):  # it waits no more
            connection.peer.send(msgspec.msgpack.encode(answer))
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._open[connection.peer.fileno()]
        if connection.event is None:
            self._poller.unregister(connection.peer.fileno())
        connection.peer.close()


def _is_own(peer: socket.socket) -> bool:
    """Whether who has connected is this user, or root."""
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (0, os.geteuid())
