"""The front door of a run's gateways: one address for agents, whatever engines come and go.

Invariants:

* It keeps nothing of its own. Which engine has a session is in the session's name; where that engine is, in the run's
  folder. So it may be started, stopped and doubled at any time.
* A session is taken at one engine only: of those that have one, at the one with the most.
* What passes through is passed on as it comes, streams piece by piece.

| waits for | who ends it |
|---|---|
| an open session | the engines' gateways, asked side by side; the time that the agent gave |
| an engine's answer | the engine's deadlines for sessions; ``FORWARD_TIMEOUT_S`` without a byte |
| an engine's own word: figures, models, a session | ``CONNECT_TIMEOUT_S`` |
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web

from penstock.backends.data.pushed.intake import RETRY_AFTER_S
from penstock.backends.episodes.api import GatewayStatus, SessionAsked, SessionTaken
from penstock.backends.episodes.http import answer_errors, json_response, key_check
from penstock.backends.episodes.pushes import PATH
from penstock.backends.episodes.registry import read_addresses, read_push_address
from penstock.backends.episodes.server import MAX_WAIT_S
from penstock.backends.processes.http_server import BOUNDS, RequestError, application, decoded
from penstock.messages.base import UNREADABLE
from penstock.messages.names import engine_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from penstock.backends.episodes.registry import GatewayAddress
    from penstock.backends.processes.http_server import Bounds

FORWARD_TIMEOUT_S: Final = 3600.0
CONNECT_TIMEOUT_S: Final = 10.0
LOOK_AGAIN_S: Final = 5.0
"""After so long an engine that came meanwhile is asked as well."""
SESSION_HEADER: Final = "X-Penstock-Session"
_SESSION_NAME: Final = re.compile(r"([0-9]{1,9})-[0-9a-z-]{1,64}")
"""As engines make them; it becomes a part of an address."""
_HOP_HEADERS: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade"})
_UNDONE_HEADERS: Final = _HOP_HEADERS | {"content-encoding"}
"""Of requests, whose bodies are unpacked when they are read; those of answers pass through as they are."""


class DoorStatus(msgspec.Struct, frozen=True):
    """``GET /status``."""

    num_open: int
    num_taken: int
    engines: list[GatewayStatus]
    silent: list[str]
    """Engines that did not answer."""


class _Named(msgspec.Struct):
    """Of a request without a session in its path."""

    user: str | None = None
    metadata: _Metadata | None = None


class _Metadata(msgspec.Struct):
    """Where Anthropic's protocol names a user."""

    user_id: str | None = None


class FrontDoor:
    """One address for all gateways of a run."""

    def __init__(self, run_folder: Path, token: str) -> None:
        self._run_folder = run_folder
        self._token = token
        self._client: aiohttp.ClientSession | None = None

    def app(self, host: str, bounds: Bounds = BOUNDS) -> web.Application:
        """What is served at this address."""
        app = application(host=host, errors=answer_errors, check_key=key_check(self._token), bounds=bounds)
        app.cleanup_ctx.append(self._open_client)
        app.add_routes(
            [
                web.post("/sessions", self._take),
                web.get("/status", self._status),
                web.get("/v1/models", self._models),
                web.post("/v1/{call:chat/completions|completions|messages}", self._answer_named),
                web.route("*", "/sessions/{name}/{rest:.*}", self._answer),
                web.post(PATH, self._pushed),
                web.get(PATH, self._pushed),
            ]
        )
        return app

    async def _open_client(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=FORWARD_TIMEOUT_S)
        # What this door reads itself is not unpacked either.
        headers = {"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        ) as self._client:
            yield

    @property
    def _engines(self) -> aiohttp.ClientSession:
        assert self._client is not None
        return self._client

    # --- sessions ---------------------------------------------------------------------------------------------

    async def _take(self, request: web.Request) -> web.Response:
        asked = decoded(await request.read() or b"{}", SessionAsked)
        deadline_s = time.monotonic() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            for address in await self._with_open(min(left_s, LOOK_AGAIN_S)):
                taken = await self._take_at(address)
                if taken is not None:
                    origin = str(request.url.origin())
                    moved = msgspec.structs.replace(taken, base_url=f"{origin}/sessions/{taken.id}/v1")
                    return json_response(moved)
            if time.monotonic() >= deadline_s:
                return web.Response(status=204)

    async def _with_open(self, wait_s: float) -> list[GatewayAddress]:
        """The engines that have an open session now, those with the most first; if none has, the first that gets one,
        and those that have one by then."""
        addresses = self._addresses()
        if not addresses:
            await asyncio.sleep(wait_s)  # the run has no engine yet, and its folder is all there is to look at
            return []
        now = await asyncio.gather(*(self._figures(address, 0.0) for address in addresses))
        if wait_s > 0 and not any(status is not None and status.num_open for status in now):
            waits = [asyncio.ensure_future(self._figures(address, wait_s)) for address in addresses]
            done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            now = [wait.result() if wait in done else None for wait in waits]
        found = [(s.num_open, a) for s, a in zip(now, addresses, strict=True) if s is not None and s.num_open]
        return [address for _, address in sorted(found, key=lambda item: -item[0])]

    async def _figures(self, address: GatewayAddress, wait_s: float) -> GatewayStatus | None:
        """What an engine's gateway says of itself, when it has an open session or the time is over; None when it does
        not answer."""
        try:
            url = f"{address.url}/sessions/open?wait_s={wait_s}"
            async with asyncio.timeout(wait_s + CONNECT_TIMEOUT_S), self._engines.get(url) as reply:
                return msgspec.json.decode(await reply.read(), type=GatewayStatus)
        except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
            await asyncio.sleep(min(wait_s, LOOK_AGAIN_S))  # its successor's address is not there yet
            return None

    async def _take_at(self, address: GatewayAddress) -> SessionTaken | None:
        """A session of this engine, if another agent was not quicker."""
        try:
            async with (
                asyncio.timeout(CONNECT_TIMEOUT_S),
                self._engines.post(f"{address.url}/sessions", data=b'{"wait_s":0}') as reply,
            ):
                if reply.status != 200:
                    return None
                return msgspec.json.decode(await reply.read(), type=SessionTaken)
        except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
            return None

    # --- everything else --------------------------------------------------------------------------------------

    async def _answer_named(self, request: web.Request) -> web.StreamResponse:
        """For agents that can name a session in a header or as the user, and cannot be given another address."""
        name = request.headers.get(SESSION_HEADER)
        if not name:
            named = decoded(await request.read(), _Named)
            name = named.user or (named.metadata.user_id if named.metadata is not None else None)
        if not name:
            raise RequestError(
                400,
                "no_session",
                f"which session? POST /sessions gives one; talk to its base_url, or name it with the header "
                f"{SESSION_HEADER} or as 'user'",
            )
        return await self._forward(request, name, f"v1/{request.match_info['call']}")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        return await self._forward(request, request.match_info["name"], request.match_info["rest"])

    async def _forward(self, request: web.Request, name: str, rest: str) -> web.StreamResponse:
        address = self._address_of(name)
        return await self._forward_to(request, f"{address.url}/sessions/{name}/{rest}", address.engine)

    async def _pushed(self, request: web.Request) -> web.StreamResponse:
        """Finished groups, for whoever takes them."""
        url = read_push_address(self._run_folder)
        if url is None:
            message = "this run takes no finished groups (data.source: pushed), or is not up yet; try again soon"
            raise RequestError(503, "no_pushes", message, RETRY_AFTER_S)
        return await self._forward_to(request, f"{url}{PATH}", "whoever takes finished groups")

    async def _forward_to(self, request: web.Request, url: str, who: str) -> web.StreamResponse:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _UNDONE_HEADERS}
        try:
            reply = await self._engines.request(request.method, url, data=await request.read(), headers=headers)
        except aiohttp.ClientError as error:  # one that is killed just now refuses, resets or answers half
            raise RequestError(
                502, "engine_unreachable", f"{who} does not answer ({error}); it may be replaced just now"
            ) from None
        async with reply:
            return await _passed_on(request, reply)

    def _address_of(self, name: str) -> GatewayAddress:
        form = _SESSION_NAME.fullmatch(name)
        engine = "" if form is None else engine_name(int(form.group(1)))
        found = [address for address in self._addresses() if address.engine == engine]
        if not found:
            raise RequestError(404, "no_such_session", f"no engine of this run has a session '{name}'")
        return found[0]

    async def _models(self, _: web.Request) -> web.Response:
        for address in self._addresses():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S), self._engines.get(f"{address.url}/v1/models") as reply:
                    return web.Response(status=reply.status, body=await reply.read(), headers=_end_to_end(reply))
            except (aiohttp.ClientError, TimeoutError):  # the next one is asked, so nothing is passed on by halves
                continue
        raise RequestError(503, "no_engine", "no engine of this run is up; try again soon")

    async def _status(self, request: web.Request) -> web.Response:
        addresses = self._addresses()
        found = await asyncio.gather(*(self._figures(address, 0.0) for address in addresses))
        engines = [status for status in found if status is not None]
        silent = [address.engine for address, status in zip(addresses, found, strict=True) if status is None]
        num_open, num_taken = sum(s.num_open for s in engines), sum(s.num_taken for s in engines)
        return json_response(DoorStatus(num_open, num_taken, engines, silent))

    def _addresses(self) -> list[GatewayAddress]:
        return read_addresses(self._run_folder)


async def _passed_on(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status, headers=_end_to_end(reply))
    await response.prepare(request)
    try:
        async for piece in reply.content.iter_any():
            await response.write(piece)
    except aiohttp.ClientError:
        # The engine died or fell silent in the middle: so does the stream, and the client sees it.
        request.protocol.force_close()
    return response


def _end_to_end(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {key: value for key, value in reply.headers.items() if key.lower() not in _HOP_HEADERS}
