"""What every HTTP server of a run holds to, whoever comes.

Invariants:

* A connection that says nothing, or half of a request's head, is closed after ``idle_s``; a body has ``body_s`` to
  arrive, and is read only when the request's key is right. There are never more than ``max_connections`` at a time.
* Head, body and nesting of JSON have bounds. What is beyond them gets an answer of 4xx and leaves no traceback.
* A server of this machine alone answers only to this machine's own names, and no page of another site: otherwise a page
  in somebody's browser could reach it under a name of its own (DNS rebinding).

| waits for | who ends it |
|---|---|
| the head of a request | the client; ``idle_s`` |
| its body | the client; ``body_s`` |
| the rest of a body that is refused | the client; ``LINGER_S`` |
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import resource
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from penstock.messages.base import Value
from penstock.messages.json_depth import MAX_DEPTH, is_too_deep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.typedefs import Handler, Middleware

MAX_BODY_BYTES: Final = 64 * 2**20
MAX_CONNECTIONS: Final = 8192

_LOG: Final = logging.getLogger(__name__)
_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@]+)(:[0-9]{1,5})?")

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Bounds(Value, frozen=True, kw_only=True):
    """Of one server."""

    idle_s: float = 30.0
    """For the next request of a connection to begin and for its head to arrive. Clients that keep connections close
    them sooner by themselves."""
    body_s: float = 60.0
    max_body_bytes: int = MAX_BODY_BYTES
    max_connections: int = MAX_CONNECTIONS
    """And never more than half of the files that this process may open."""


BOUNDS: Final = Bounds()
LINGER_S: Final = 10.0
"""A client that is refused in the midst of its body may finish it for as long, so that it reads the answer; never
longer than any body has."""


class RequestError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int = 0) -> None:
        """``retry_after_s``: the same may be asked again after so long; 0: nobody knows."""
        super().__init__(status, code, message, retry_after_s)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s


class Listener:
    """A server that listens, until it is closed."""

    def __init__(self, server: asyncio.Server, runner: web.AppRunner) -> None:
        self._server = server
        self._runner = runner
        self.port = int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End it: answers that are being written have the time that was given when it was opened."""
        self._server.close()
        await self._runner.cleanup()


def application(*, host: str, errors: Middleware, check_key: Middleware, bounds: Bounds = BOUNDS) -> web.Application:
    """An application without routes whose requests are checked, in this order: host, key, everything else.

    Args:
        host: The address that it is going to listen on.
        errors: Answers for a ``RequestError`` and for what handlers raise.
        check_key: Lets those pass who may ask.
        bounds: As for :func:`listen`.
    """

    @web.middleware
    async def check_head(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_head(request, host)
        return await handler(request)

    @web.middleware
    async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            for name, value in request.raw_headers:
                (name + value).decode()
        except UnicodeDecodeError:
            raise RequestError(400, "invalid_request", "a header is not UTF-8") from None
        try:
            async with asyncio.timeout(bounds.body_s):
                await request.read()  # which keeps it for the handler
        except TimeoutError:
            raise RequestError(408, "timeout", f"the body has not arrived within {bounds.body_s:g} s") from None
        except (web.RequestPayloadError, ValueError) as error:
            raise RequestError(400, "invalid_request", f"the body cannot be read: {error}") from None
        return await handler(request)

    return web.Application(
        client_max_size=bounds.max_body_bytes, middlewares=[_let_go, errors, check_head, check_key, read_body]
    )


@web.middleware
async def _let_go(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whoever goes away, within the body or the answer, is told nothing and is nothing to log."""
    try:
        return await handler(request)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=499)


async def listen(
    app: web.Application,
    host: str,
    port: int,
    *,
    bounds: Bounds = BOUNDS,
    shutdown_s: float = 1.0,
    handler_cancellation: bool = False,
) -> Listener:
    """Serve the application.

    Args:
        app: Made by :func:`application` with the same host and bounds.
        host: Address to listen on.
        port: 0 takes a free one.
        bounds: See there.
        shutdown_s: For answers that are being written when it closes.
        handler_cancellation: Whether a client that goes away ends the work on its request.

    Raises:
        OSError: it cannot listen there.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=shutdown_s,
        handler_cancellation=handler_cancellation,
        keepalive_timeout=bounds.idle_s,
        lingering_time=min(bounds.body_s, LINGER_S),
        logger=_LOG,
    )
    await runner.setup()
    serve = runner.server
    assert serve is not None, "set up"
    most = min(bounds.max_connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))

    def accept() -> asyncio.Protocol:
        return serve() if len(serve.connections) < most else _Full()

    try:
        server = await asyncio.get_running_loop().create_server(accept, host, port)
    except OSError:
        await runner.cleanup()
        raise
    return Listener(server, runner)


def _is_ours(record: logging.LogRecord) -> bool:
    """Not what the parser says about a client, with a traceback for each request or body that is none."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError)


_LOG.addFilter(_is_ours)


class _Full(asyncio.Protocol):
    """Closes the connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def check_token(headers: Mapping[str, str], token: str) -> bool:
    """Whether the request names this token as its bearer's."""
    given = headers.get("Authorization", "").strip()
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())


def decoded(body: bytes, form: type[StructT]) -> StructT:
    """The body of a request.

    Raises:
        RequestError: it has another form, or is nested too deeply.
    """
    try:
        value = msgspec.json.decode(body, type=form)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, "invalid_request", f"the request's body: {error}") from None
    if is_too_deep(body):
        raise _too_deep()
    return value


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _too_deep() -> RequestError:
    return RequestError(400, "invalid_request", f"the body has more than {MAX_DEPTH} levels of lists and objects")


def _check_head(request: web.Request, bound_to: str) -> None:
    given = _AUTHORITY.fullmatch(request.headers.get("Host", ""))
    if given is None:
        raise RequestError(400, "invalid_request", "the Host header names no host")
    if is_loopback(bound_to) and not is_loopback(given.group(1).strip("[]")):
        raise RequestError(
            403,
            "other_host",
            f"this server is for its own machine: ask it as {bound_to} or localhost, by no other name",
        )
    origin = request.headers.get("Origin")
    if origin not in (None, f"http://{given.group()}", f"https://{given.group()}"):
        raise RequestError(403, "other_origin", "pages of other sites are not served")
