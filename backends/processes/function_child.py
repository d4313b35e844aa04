"""The child's end of :mod:`penstock.backends.processes.frames`, in the process that runs users' functions.

A wait for the next order ends with the parent, whose death ends this process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, TypeVar

from penstock.backends.processes.frames import READ_BYTES, FrameReader, LoadFailed
from penstock.backends.processes.process_facts import end_with_parent
from penstock.backends.processes.user_code import told
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator

    from msgspec.msgpack import Decoder

TakenT = TypeVar("TakenT")


def line_to_parent() -> tuple[socket.socket, list[str]]:
    """The socket to the parent, and what the command line of a
    :class:`~penstock.backends.processes.function_process.FunctionProcess` gives beside it.

    From here on this process hears signals, and the kernel kills it with the thread that started it, whatever it does.
    """
    descriptor, *arguments, parent = sys.argv[1:]
    # Actors run with signals blocked, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)
    os.set_inheritable(int(descriptor), False)  # or what a function starts keeps it open after our death
    return socket.socket(fileno=int(descriptor)), arguments


def load_failure(error: BaseException, what: str) -> LoadFailed:
    """That loading ``what`` has raised this."""
    return LoadFailed(str(error) if isinstance(error, UserFault) else f"{what}: {told(error)}")


def orders_of(line: socket.socket, decoder: Decoder[list[TakenT]]) -> Iterator[TakenT]:
    """What the parent says, until it is gone."""
    reader = FrameReader(decoder)
    while data := line.recv(READ_BYTES):
        yield from reader.feed(data)


async def orders_beside(stream: asyncio.StreamReader, decoder: Decoder[list[TakenT]]) -> AsyncIterator[TakenT]:
    """As :func:`orders_of`, where functions run in the same event loop."""
    reader = FrameReader(decoder)
    while data := await stream.read(READ_BYTES):
        for order in reader.feed(data):
            yield order
