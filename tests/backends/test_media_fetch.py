"""What rows name by address is fetched by the engine, and from the hosts of the scenario alone."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sglang_replay import recorded, replay
from test_sglang_client import call_of, generator_for

from penstock.backends.data.options import DataOptions
from penstock.backends.engines.served.base.calls import Failure
from penstock.backends.engines.served.base.http import BadReply
from penstock.backends.engines.served.sglang.media_fetch import MediaFetcher
from penstock.messages.samples import Media

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TIMEOUT_S = 20.0
PNG = b"\x89PNG\r\n\x1a\n" + bytes(24)
MAX_BYTES = 64


class Host:
    """A host of images, and beside it, under another name, what rows must not reach."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.host.partition(':')[0]}{request.path}")
        match request.path:
            case "/a.png":
                return web.Response(body=PNG)
            case "/moved":
                raise web.HTTPFound("/a.png")
            case "/elsewhere":
                raise web.HTTPFound(f"{self.url.replace('127.0.0.1', 'localhost')}/a.png")
            case "/metadata":
                raise web.HTTPTemporaryRedirect("http://169.254.169.254/latest/meta-data/")
            case "/file":
                return web.Response(status=301, headers={"Location": "file:///etc/passwd"})
            case "/round":
                raise web.HTTPFound("/round")
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:  # until nobody reads it
                    await response.write(bytes(MAX_BYTES))
            case "/silent":
                await asyncio.Event().wait()
            case _:
                pass
        raise web.HTTPNotFound


@asynccontextmanager
async def host() -> AsyncGenerator[Host]:
    host = Host()
    app = web.Application()
    app.router.add_get("/{path:.*}", host.answer)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(shutdown_timeout=0.0)
    host.url = str(server.make_url("/")).rstrip("/")
    try:
        yield host
    finally:
        await server.close()


def fetcher() -> MediaFetcher:
    return MediaFetcher(DataOptions(path="rows.jsonl", media_hosts=("127.0.0.1",), max_media_bytes=MAX_BYTES))


def as_data(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def fetched(path: str, timeout_s: float = TIMEOUT_S) -> tuple[list[str], list[str]]:
    """What it becomes; who was asked for what."""
    async with host() as images:
        media = (Media("image", f"{images.url}{path}"), Media("image", "/b.png"))
        found = await fetcher().fetched(media, timeout_s)
        return [each.reference for each in found], images.asked


@pytest.mark.parametrize(("path", "asked"), [("/a.png", 1), ("/moved", 2)])
def test_an_address_becomes_what_it_holds(path: str, asked: int) -> None:
    references, who = asyncio.run(fetched(path))
    assert references == [as_data(PNG), "/b.png"]
    assert len(who) == asked


REFUSED = {
    "/elsewhere": "it is redirected to http://localhost:",
    "/metadata": "it is redirected to http://169.254.169.254/latest/meta-data/, which is at no host of data.",
    "/file": "it is redirected to file:///etc/passwd, which is at no host of data.media_hosts",
    "/round": "it is redirected 5 times",
    "/endless": "it has more than 64 bytes",
    "/nothing": "127.0.0.1 answers 404",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_leads_elsewhere_or_is_too_much_is_not_taken(path: str) -> None:
    async def refused() -> list[str]:
        async with host() as images:
            with pytest.raises(BadReply) as raised:
                await fetcher().fetched((Media("image", f"{images.url}{path}"),), TIMEOUT_S)
            assert raised.value.message.startswith(f"image {images.url}{path} cannot be fetched: {REFUSED[path]}")
            return images.asked

    assert set(asyncio.run(refused())) == {f"127.0.0.1{path}"}, "nobody else was asked"


def test_one_that_does_not_answer_has_the_time_of_its_request() -> None:
    with pytest.raises(BadReply, match="/silent cannot be fetched: TimeoutError"):
        asyncio.run(fetched("/silent", timeout_s=0.05))


def test_the_server_gets_bytes_and_no_address() -> None:
    async def asked(path: str) -> tuple[list[object], Failure | None]:
        async with host() as images, replay(recorded("incremental_length")) as server:
            async with generator_for(server.url, fetcher=fetcher()) as generator:
                call = call_of(media=(Media("image", f"{images.url}{path}"),))
                generated = await generator.generate(call, lambda _: None)
            return [each.body["image_data"] for each in server.requests], generated.failure

    assert asyncio.run(asked("/a.png")) == ([[as_data(PNG)]], None)
    assert asyncio.run(asked("/metadata")) == ([], Failure.BAD_REPLY)
