"""The HTTP server behind ``/metrics``.

Invariants:

* Whoever reaches the port from another machine has to show the token of the run. It is in a file that only the run's
  user can read, and nowhere else.
* Everything but ``close`` runs on one event loop, on a thread of its own.

| waits for | who ends it |
|---|---|
| the thread, for requests | ``close`` |
| ``close`` for the thread | its own deadline |
"""

# prometheus-client's exposition is typed in part only:
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from penstock.backends.processes.http_server import BOUNDS, RequestError, application, check_token, is_loopback, listen
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp.typedefs import Handler
    from prometheus_client import CollectorRegistry

    from penstock.backends.processes.http_server import Bounds

METRICS_HOST: Final = "127.0.0.1"
TOKEN_FILE: Final = "metrics.token"
"""In the run's folder, where a token is needed."""
_LISTEN_S: Final = 30.0
_STOP_S: Final = 2.0


class MetricsServer:
    """Serves from here on until ``close``."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, token: str | None, bounds: Bounds) -> None:
        """Listens.

        Raises:
            OSError: it cannot listen there.
        """
        self._registry = registry
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        listens: Future[int] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(host, port, bounds, listens), name="metrics", daemon=True
        )
        self._thread.start()
        self.port = listens.result(_LISTEN_S)
        """The port it listens on, also when 0 was asked for."""

    def close(self) -> None:
        """Stop serving and free the port."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * _STOP_S)

    def _run(self, host: str, port: int, bounds: Bounds, listens: Future[int]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(host, port, bounds, listens))

    async def _serve(self, host: str, port: int, bounds: Bounds, listens: Future[int]) -> None:
        app = application(host=host, errors=_answer_errors, check_key=self._check_key, bounds=bounds)
        app.add_routes([web.get("/metrics", self._expose), web.get("/", self._expose)])
        try:
            listener = await listen(app, host, port, bounds=bounds, shutdown_s=_STOP_S)
        except OSError as error:
            listens.set_exception(error)
            return
        listens.set_result(listener.port)
        await self._closing.wait()
        await listener.close()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is not None and not check_token(request.headers, self._token):
            raise RequestError(401, "token", "the token of the run is needed")
        return await handler(request)

    async def _expose(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        answer = web.Response(body=encode(self._registry), headers={"Content-Type": content_type})
        answer.enable_compression()
        return answer


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return web.Response(text=f"{error.message}\n", status=error.status, headers=headers)


def serve_metrics(
    port: int,
    registry: CollectorRegistry,
    *,
    host: str = METRICS_HOST,
    token: str | None = None,
    bounds: Bounds = BOUNDS,
) -> MetricsServer:
    """Serve the registry on ``http://host:port/metrics``.

    Args:
        port: 0 takes a free one.
        registry: what to serve.
        host: the address to listen on; by default this machine only.
        token: that a client has to show, as ``Authorization: Bearer …``. Needed unless the address is this machine's
            own.
        bounds: of the server.

    Raises:
        UserFault: somebody else listens there, or the port cannot be used for another reason.
    """
    assert token is not None or is_loopback(host), f"/metrics on {host} without a token"
    try:
        return MetricsServer(registry, host, port, token, bounds)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserFault(
                f"observability.metrics_port: port {port} on {host} is in use by another process; choose another "
                "port, or 0 for any free one"
            ) from error
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UserFault(
            f"observability.metrics_port: cannot listen on port {port} on {host} ({why}); choose another port, or 0 "
            "for any free one"
        ) from error


def write_token(run_folder: Path) -> str:
    """A token of this run that nobody has seen before, also written where only the run's user can read it."""
    token = secrets.token_urlsafe(32)
    path = run_folder / TOKEN_FILE
    path.unlink(missing_ok=True)  # of an earlier drive: its mode is whatever somebody has made of it
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token
