"""A server that dies in a chosen way at each request: what a peer does that is killed just then, or is none."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

Death = Literal[
    "reset-unread",
    "reset",
    "close",
    "half-head",
    "half-head-reset",
    "no-head",
    "half-body",
    "half-body-reset",
    "half-chunk",
    "half-chunk-reset",
    "no-chunk",
    "no-gzip",
    "silent",
    "silent-within",
]
DEATHS: Final[tuple[Death, ...]] = get_args(Death)
"""The last two are those of a stopped process: the connection stays, and nothing follows."""

_OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_SAID: Final[dict[str, bytes]] = {
    "half-head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "half-head-reset": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "no-head": b"\x00\x01 is no status line\r\n\r\n",
    "half-body": _OK + b'Content-Length: 100\r\n\r\n{"half":',
    "half-body-reset": _OK + b'Content-Length: 100\r\n\r\n{"half":',
    "half-chunk": _OK + b'Transfer-Encoding: chunked\r\n\r\n20\r\n{"half":',
    "half-chunk-reset": _OK + b'Transfer-Encoding: chunked\r\n\r\n20\r\n{"half":',
    "no-chunk": _OK + b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"half":\r\nnot hexadecimal\r\n',
    "no-gzip": _OK + b"Content-Encoding: gzip\r\nContent-Length: 11\r\n\r\nis no gzip.",
    "silent-within": _OK + b'Content-Length: 100\r\n\r\n{"half":',
}


class DyingPeer:
    """Where it is, how often it was asked, and what it still answers."""

    def __init__(self, death: Death) -> None:
        self.death = death
        self.answers: dict[str, bytes] = {}
        """Path → body: what these are asked is answered with 200."""
        self.num_asked = 0
        self.url = ""
        self._waits: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.num_asked += 1
        if self.death != "reset-unread" or self.answers:
            path = await _request(reader)
            if (answer := self.answers.get(path)) is not None:
                writer.write(_OK + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
                await writer.drain()
                writer.close()
                return
        writer.write(_SAID.get(self.death, b""))
        await writer.drain()
        if self.death.startswith("silent"):
            self._waits.add(writer)
            return
        if "reset" in self.death:
            if self.death in _SAID:
                await asyncio.sleep(0.05)  # bytes that a reset overtakes would never have been sent
            line = writer.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    def end(self) -> None:
        """Let go of whom it lets wait."""
        for writer in self._waits:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> str:
    """Read it; its path."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.split(b":")[1]))
    return head.split(b" ")[1].partition(b"?")[0].decode()


@asynccontextmanager
async def dying_peer(death: Death) -> AsyncGenerator[DyingPeer]:
    """A server at 127.0.0.1 that dies so at every request."""
    peer = DyingPeer(death)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.url = "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]  # noqa: UP031
    try:
        yield peer
    finally:
        peer.end()
        server.close()
