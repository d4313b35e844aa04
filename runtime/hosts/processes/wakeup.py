"""How threads hand something to the loop that owns the sockets.

Invariants:

* ``put`` may be called from any thread and never blocks.
* What was put before the loop looks is seen then; what is put later makes ``fileno`` readable.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Wakeup(Generic[ItemT]):
    """A queue with a file descriptor that a poller can wait for."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_signalled = False

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._reader.fileno()

    def put(self, item: ItemT) -> None:
        """Hand something over. One byte on the wire stands for everything until the loop looks."""
        self._items.append(item)
        if not self._is_signalled:
            self._is_signalled = True
            with contextlib.suppress(OSError):  # closed: a thread of the backend outlived it, and nobody listens
                self._writer.send(b"\0")

    def take(self) -> list[ItemT]:
        """Everything that was put so far, in order."""
        # The order matters: the byte first, then the flag, then the items. Whoever puts something in between either
        # is seen below or finds the flag down and writes a byte of its own.
        if self._is_signalled:
            try:
                self._reader.recv(4096)
            except BlockingIOError:
                return []
            self._is_signalled = False
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Nobody listens any more; what is put from here on is dropped."""
        self._reader.close()
        self._writer.close()
