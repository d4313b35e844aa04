"""One end of the line between a rank and the process that started it: whole messages, large ones by reference.

Invariants:

* What is longer than ``INLINE_BYTES`` lies in sealed anonymous memory: it is written once, whomever it is sent to,
  nobody can change it, it has no name, and it goes with the last process that has it open.
* A message arrives whole or not at all.
* Several threads may send; one receives.

Waits: ``receive`` waits for the other end, which closes when its process ends; ``send`` as long as it is told that the
peer may leave its messages unread.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

INLINE_BYTES: Final = 32 << 10
_INLINE: Final = b"i"
_REFERENCE: Final = b"r"
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class ChannelClosedError(OSError):
    """The process at the other end has ended, or closed the line."""


class Parcel:
    """A message that is ready to be sent, to one peer or to several."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._descriptor: int | None = None
        if len(data) > INLINE_BYTES:
            self._descriptor = _sealed(data)

    def send_on(self, line: socket.socket) -> None:
        """Without waiting.

        Raises:
            BlockingIOError: the peer has not read what came before.
        """
        if self._descriptor is None:
            line.send(_INLINE + self._data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        else:
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            socket.send_fds(line, [_REFERENCE], [self._descriptor], flags)

    def close(self) -> None:
        """Let go of the memory; those whom it was sent to keep it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Channel:
    """One end of the line."""

    def __init__(self, line: socket.socket) -> None:
        """``line`` is a connected Unix socket that keeps messages apart (``SOCK_SEQPACKET``)."""
        self._line = line

    def fileno(self) -> int:
        """For a selector: readable when a message is there, or the end."""
        return self._line.fileno()

    def send(self, parcel: Parcel, *, wait_s: float = 0.0) -> None:
        """Send a message.

        Raises:
            TimeoutError: the peer has left too many unread for too long.
            ChannelClosedError: it has ended.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                parcel.send_on(self._line)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosedError("the process at the other end has ended") from error
            except BlockingIOError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"the process at the other end has read nothing for {wait_s:g} s") from None
                poll = select.poll()
                poll.register(self._line, select.POLLOUT)
                poll.poll(left_s * 1000)
            else:
                return

    def say(self, data: bytes, *, wait_s: float = 0.0) -> None:
        """Send one message to this peer alone; see :meth:`send`."""
        parcel = Parcel(data)
        try:
            self.send(parcel, wait_s=wait_s)
        finally:
            parcel.close()

    def receive(self, decode: Callable[[bytes | memoryview], T]) -> T:
        """The next message, as ``decode`` makes it of the bytes; these are gone when it returns.

        Raises:
            ChannelClosedError: there will be none.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._line, INLINE_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:
            raise ChannelClosedError("the process at the other end has ended") from error
        if not data:
            raise ChannelClosedError("the process at the other end has closed the line")
        if data[:1] == _INLINE:
            return decode(memoryview(data)[1:])
        (descriptor,) = descriptors
        try:
            with mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapping, memoryview(mapping) as view:
                return decode(view)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """The other end notices."""
        self._line.close()


def _sealed(data: bytes) -> int:
    descriptor = os.memfd_create("penstock-order", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, len(data))
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
