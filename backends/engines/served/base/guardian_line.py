"""The line to a server's guardian: of one that this process has started, or of one that it takes over.

Words to the guardian are short and it always reads, so saying one does not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import TYPE_CHECKING, Final, Protocol

from penstock.backends.engines.served.base.processes import has_ended
from penstock.backends.processes.guardian import END, KEEP, LAST
from penstock.backends.processes.process_facts import kill, start_ticks_of

if TYPE_CHECKING:
    import subprocess

MAX_WORD_BYTES: Final = 1 << 20
_PID_BYTES: Final = 12
"""Of what ``SO_PEERCRED`` tells: three numbers, the process first."""


class GuardianLine(Protocol):
    """What a launcher has of a guardian."""

    pid: int

    async def word(self) -> bytes:
        """The next line that it says; empty at its end."""
        ...

    def keep(self, text: str) -> None:
        """Have it keep one line of text for a successor, in place of the last one."""
        ...

    def be_last(self) -> None:
        """Have it wait for no successor when this process is gone."""
        ...

    def end(self) -> None:
        """Have it end the server, and itself."""
        ...

    def kill(self) -> None:
        """SIGKILL; the kernel then ends the server's main process."""
        ...

    async def wait(self) -> int | None:
        """Until it is gone; its exit code, where that can be known."""
        ...


class OwnGuardian:
    """Of a guardian that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._words = asyncio.StreamReader(limit=MAX_WORD_BYTES)
        self._process = process

    async def open(self) -> None:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._words), self._process.stdout)

    async def word(self) -> bytes:
        """See the protocol, as for the other methods."""
        return await self._words.readline()

    def keep(self, text: str) -> None:
        self._say(KEEP + text.encode())

    def be_last(self) -> None:
        self._say(LAST)

    def end(self) -> None:
        self._say(END)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    async def wait(self) -> int | None:
        return await asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    def _say(self, word: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.closed:
            with contextlib.suppress(BrokenPipeError):  # its end is noticed by whoever waits for it
                pipe.write(word + b"\n")
                pipe.flush()


class FoundGuardian:
    """Of a guardian that another process has started."""

    def __init__(self, pid: int, words: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._words = words
        self._start_ticks = start_ticks_of(pid)
        self._writer = writer

    @classmethod
    async def open(cls, socket_name: str) -> FoundGuardian:
        """Ask one that waits there.

        Raises:
            OSError: nobody listens.
        """
        line = socket.socket(socket.AF_UNIX)
        try:
            line.setblocking(False)
            await asyncio.get_running_loop().sock_connect(line, f"\0{socket_name}")
            peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PID_BYTES)
            words, writer = await asyncio.open_unix_connection(sock=line, limit=MAX_WORD_BYTES)
        except BaseException:
            line.close()
            raise
        return cls(int.from_bytes(peer[:4], "little"), words, writer)

    async def word(self) -> bytes:
        """See the protocol, as for the other methods."""
        try:
            return await self._words.readline()
        except ConnectionResetError:
            return b""

    def keep(self, text: str) -> None:
        self._say(KEEP + text.encode())

    def be_last(self) -> None:
        self._say(LAST)

    def end(self) -> None:
        self._say(END)
        self._writer.close()

    def kill(self) -> None:
        kill(self.pid, self._start_ticks)

    async def wait(self) -> int | None:
        await has_ended(self.pid, self._start_ticks, None)
        return None

    def _say(self, word: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(word + b"\n")
