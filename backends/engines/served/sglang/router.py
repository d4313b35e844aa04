"""An sglang-router (0.3.2) in front of servers that run already: what is asked of it before requests go through it.

With a router in front nobody but the router knows which server gets a request. What follows for an EngineWorker:

* *All servers behind one router are one engine*, driven by one EngineWorker. Generation goes to the router, control to
  each server: the router passes on no abort, pause, update or server information (404).
* An update pauses all of them, loads all of them, checks all of them, and only then continues any: between the first
  and the last one no request may be in the router, for it could reach either version.
* Which version made which tokens is what the reply says (``weight_version``, ``weight_versions``), never which server
  was meant. That an engine serves a version means that every one of its servers does.
* An abort goes to every server, since any may have the request; a server that does not know it answers 200 as well.
* A server that dies takes the whole engine with it, as a rank of a server would.

*Flags that the router needs*, and that it tells nobody, so they cannot be checked here:

``--disable-retries``
    Otherwise it sends a request that a server refused, or lost before it answered, up to five times to others. A stream
    that has begun it never repeats, and every request of ours is a stream, so forgetting the flag costs time and tokens
    that nobody counts, not the truth of a sample.
``--disable-circuit-breaker``
    Otherwise failures during an update keep a server out for a minute.
``--health-check-endpoint /server_info``
    A paused server answers ``/health`` with 503 and would be left out after each update; ``/server_info`` is answered.

Prefill and decode groups (``--pd-disaggregation``) are listed alike: every server of either kind is an address.

| waits for | who ends it |
|---|---|
| the router to know every server and find it healthy | the router's own health checks; ``timeout_s``. It tells nobody, so it is asked again every ``ASK_AGAIN_S`` |
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.engines.served.base.http import BadReply, ConnectFailed, CutOff, ServerBusy, TimedOut
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.backends.engines.served.base.http import ServerHttp

FLAGS: Final = ("--disable-retries", "--disable-circuit-breaker", "--health-check-endpoint", "/server_info")
ASK_AGAIN_S: Final = 0.2
CALL_TIMEOUT_S: Final = 5.0


class RouterWorker(msgspec.Struct, frozen=True):
    """A server, as the router sees it."""

    url: str
    is_healthy: bool = False

    @property
    def address(self) -> str:
        """Without the rank that the router adds for each data-parallel part of a server."""
        return self.url.partition("@")[0].rstrip("/")


class _Workers(msgspec.Struct, frozen=True):
    workers: tuple[RouterWorker, ...]


class _Readiness(msgspec.Struct, frozen=True):
    status: str


_WORKERS: Final = msgspec.json.Decoder(_Workers)
_READINESS: Final = msgspec.json.Decoder(_Readiness)


async def await_router(http: ServerHttp, addresses: Collection[str], *, timeout_s: float) -> None:
    """Wait until the router is ready and has exactly these servers, each of them healthy.

    To be called before the first request, and after each update before requests are let in again.

    Args:
        http: of the router.
        addresses: of the servers, as the router was given them.
        timeout_s: for the router to find all of them.

    Raises:
        UserFault: it has another one, at once; it lacks one, or finds one unhealthy, when the time is over.
        Refused: it wants a key.
    """
    wanted = {address.rstrip("/") for address in addresses}
    problem = "it was not asked"
    try:
        async with asyncio.timeout(timeout_s):
            while problem := await _problem(http, wanted):  # noqa: ASYNC110 - a router tells nobody when it changes
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise UserFault(
            f"engines.router: {http.base_url} is not ready after {timeout_s:g} s: {problem}. It has to be started with "
            f"--worker-urls {' '.join(sorted(wanted))} {' '.join(FLAGS)}"
        ) from None


async def _problem(http: ServerHttp, wanted: set[str]) -> str:
    """What is still missing; empty when nothing is."""
    try:
        readiness = _READINESS.decode(await http.call("GET", "/readiness", timeout_s=CALL_TIMEOUT_S))
        workers = _WORKERS.decode(await http.call("GET", "/workers", timeout_s=CALL_TIMEOUT_S)).workers
    except (ConnectFailed, CutOff, ServerBusy, TimedOut) as error:
        return str(error)
    except (BadReply, *UNREADABLE) as error:
        raise UserFault(f"engines.router: what answers at {http.base_url} is no sglang-router: {error}") from error
    found = {worker.address for worker in workers}
    if strangers := sorted(found - wanted):
        raise UserFault(
            f"engines.router: {http.base_url} also sends requests to {', '.join(strangers)}, which nobody would load "
            "new weights into; list it under engines.addresses, spelt alike, or take it from the router"
        )
    if missing := sorted(wanted - found):
        return f"it does not know {', '.join(missing)}"
    if unhealthy := sorted({worker.address for worker in workers if not worker.is_healthy}):
        return f"it finds {', '.join(unhealthy)} unhealthy"
    return "" if readiness.status == "ready" else f"it says {readiness.status!r}"
