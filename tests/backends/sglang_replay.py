"""A real HTTP server in the test's own loop that answers as a SGLang server was recorded to answer, or worse."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

REPLIES = Path(__file__).with_name("sglang_replies")
DONE = b"data: [DONE]\n\n"


class Recording(msgspec.Struct):
    """One answer of a real server, with what it was asked."""

    request: dict[str, object]
    status: int
    body: str

    @property
    def events(self) -> list[bytes]:
        """Of a stream, ``[DONE]`` included."""
        return [event.encode() + b"\n\n" for event in self.body.split("\n\n") if event]


def recording(name: str) -> Recording:
    return msgspec.json.decode((REPLIES / f"{name}.json").read_bytes(), type=Recording)


class GenerateRequest(msgspec.Struct):
    """What arrived at the server."""

    body: dict[str, object]
    headers: dict[str, str]
    aborts_before: int
    """How many aborts had come by then."""


class Exchange:
    """One request and the connection on which it is to be answered."""

    def __init__(self, request: web.Request, server: ReplayServer) -> None:
        self.request = request
        self.server = server
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def send(self, *pieces: bytes) -> None:
        """Pieces of a stream, each written by itself."""
        if not self.response.prepared:
            await self.response.prepare(self.request)
        for piece in pieces:
            await self.response.write(piece)

    def cut(self) -> None:
        """Drop the connection."""
        transport = self.request.transport
        assert transport is not None
        transport.abort()


Answer = Callable[[Exchange], Awaitable[web.StreamResponse | None]]
"""None: what was sent on the exchange is the answer."""


class ReplayServer:
    """Answers the first ``/generate`` with the first answer, and so on; the last one answers all that follow."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.requests: list[GenerateRequest] = []
        self.aborted: list[object] = []
        self.aborted_now = asyncio.Event()
        self.begun = asyncio.Event()
        self.url = ""
        self.control: dict[str, tuple[int, bytes]] = {}
        self.told: list[tuple[str, object, str]] = []
        """Path, body and query of the control calls."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=dict[str, object])
        self.requests.append(GenerateRequest(body, dict(request.headers), len(self.aborted)))
        self.begun.set()
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        exchange = Exchange(request, self)
        return await answer(exchange) or exchange.response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append(msgspec.json.decode(await request.read(), type=dict[str, object]).get("rid"))
        self.aborted_now.set()
        return web.Response()

    async def any(self, request: web.Request) -> web.Response:
        data = await request.read()
        self.told.append((request.path, msgspec.json.decode(data) if data else None, request.query_string))
        status, body = self.control[request.path]
        return web.Response(status=status, body=body)


@asynccontextmanager
async def replay(*answers: Answer) -> AsyncGenerator[ReplayServer]:
    """A server on a port of its own."""
    server = ReplayServer(answers)
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_route("*", "/{path:.*}", server.any)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


# --- answers --------------------------------------------------------------------------------------------------


def recorded(name: str, piece_bytes: int = 0) -> Answer:
    """As recorded; event by event, or in pieces of so many bytes."""
    found = recording(name)

    async def answer(exchange: Exchange) -> web.StreamResponse | None:
        if not found.body.startswith("data: "):
            return web.Response(status=found.status, body=found.body.encode())
        pieces = found.events
        if piece_bytes:
            data = b"".join(pieces)
            pieces = [data[i : i + piece_bytes] for i in range(0, len(data), piece_bytes)]
        await exchange.send(*pieces)
        return None

    return answer


def events(*pieces: bytes) -> Answer:
    """A stream of these bytes, with a proper end."""

    async def answer(exchange: Exchange) -> None:
        await exchange.send(*pieces)

    return answer


def cut_after(*pieces: bytes) -> Answer:
    """The connection is lost after these bytes; without any, before the status line."""

    async def answer(exchange: Exchange) -> None:
        if pieces:
            await exchange.send(*pieces)
        exchange.cut()

    return answer


def stalled(*pieces: bytes, after_abort: Sequence[bytes] = ()) -> Answer:
    """Nothing comes after these bytes until an abort, which is answered with the others, or with nothing."""

    async def answer(exchange: Exchange) -> None:
        await exchange.send(*pieces)
        await exchange.server.aborted_now.wait()
        if not after_abort:
            await asyncio.Event().wait()
        await exchange.send(*after_abort)

    return answer


def status(code: int, body: bytes = b"") -> Answer:
    """No stream, but this."""

    async def answer(_: Exchange) -> web.StreamResponse:
        return web.Response(status=code, body=body)

    return answer


def raw(data: bytes) -> Answer:
    """These bytes instead of HTTP."""

    async def answer(exchange: Exchange) -> None:
        transport = exchange.request.transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(data)
        transport.close()

    return answer
