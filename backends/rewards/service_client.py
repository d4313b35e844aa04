"""Requests to a service that may fail in every way: deadlines, retries with back-off, a circuit breaker.

Invariants:

* A request ends by its deadline, with an answer or with the reason why there is none.
* A request that may have reached the service is made again only where the scenario says that it may be.
* An answer is read only up to the size that is allowed, and only JSON is one.
* Connections are kept; no more requests run at a time than the pool sends calls.
* Of several endpoints the next try asks another one than the one that has just failed.

| waits for | who ends it |
|---|---|
| an answer | the service; ``request_timeout_s``, and the call's own deadline |
| the next try | the clock; ``Retry-After`` of the service, bounded by the deadline |
| a service that returns | the clock, as above; whoever starts it again |
| the breaker | see :mod:`penstock.backends.rewards.breaker` |
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
import msgspec

from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.breaker import Breaker, BreakerOpenError
from penstock.backends.rewards.functions import NoRewardError
from penstock.messages.base import UNREADABLE
from penstock.messages.texts import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.rewards.service_options import ServiceOptions

MAY_PASS: Final = frozenset((408, 421, 425, 429, 500, 502, 503, 504))
"""Statuses after which the same request may well be answered."""
WAS_REFUSED: Final = frozenset((421, 425, 429, 503))
"""Statuses that say that the service has not worked on the request."""
MAX_SHOWN_BYTES: Final = 200


class _Failure(NamedTuple):
    """Of one try."""

    reason: str
    is_final: bool
    """The same request would fail again."""
    reached: bool = True
    """The service may have worked on it."""
    wait_s: float = 0.0
    """At least so long, as the service says."""
    counts: bool = True
    """It says that the service does not work."""
    url: str = ""
    """URL of the endpoint that was asked."""


class Endpoint(NamedTuple):
    """Where a service is."""

    url: str
    key: str = ""
    """Its own; empty: that of the options, if they name one."""


class ServiceClient:
    """Posts JSON to a service. Made and used in a process of its own."""

    def __init__(
        self, options: ServiceOptions, endpoints: Callable[[], Sequence[Endpoint]], *, what: str, returns: bool = False
    ) -> None:
        """
        Args:
            options: how it is asked.
            endpoints: where it is at the moment; several are asked in turn.
            what: the scenario's block, for messages.
            returns: somebody starts it again when it is gone, so that a try that has not reached it is none of
                ``num_retries`` and nothing that the breaker counts: only the deadline ends these.

        Raises:
            UserCodeError: the environment has no key for it.
        """
        self._options = options
        self._endpoints = endpoints
        self._what = what
        self._returns = returns
        self._headers = {"Content-Type": "application/json", **_authorization(options.auth_env, what)}
        self._breaker = Breaker(options.breaker_failures, options.breaker_open_s, time.monotonic)
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0

    async def ask(self, body: object, *, request_id: str) -> object:
        """The answer to this body.

        Raises:
            NoRewardError: there is none; the message is the whole reason.
        """
        data = msgspec.json.encode(body)
        deadline_s = time.monotonic() + self._options.timeout_s
        last, failed_url = "", ""
        number = num_counted = 0
        while True:
            try:
                await self._breaker.admit(deadline_s)
            except BreakerOpenError as error:
                raise NoRewardError(f"{self._what}: {error}{_after(last)}") from None
            found = await self._try(data, request_id, deadline_s, failed_url)
            if not isinstance(found, _Failure):
                return found
            last, failed_url = without_credentials(found.reason), found.url
            can_repeat = self._options.repeats or not found.reached
            left_s = deadline_s - time.monotonic()
            wait_s = max(found.wait_s, self._backoff_s(number))
            number += 1
            num_counted += found.reached or not self._returns
            if found.is_final or not can_repeat:
                raise NoRewardError(f"{self._what}: {last}{f' ({number} tries)' if number > 1 else ''}")
            if num_counted > self._options.num_retries or wait_s >= left_s:
                raise NoRewardError(f"{self._what}: {last} ({number} tries)")
            await asyncio.sleep(wait_s)

    def _backoff_s(self, number: int) -> float:
        whole_s = min(self._options.max_backoff_s, self._options.backoff_s * 2.0**number)
        return whole_s * random.uniform(0.5, 1.0)

    async def _try(self, data: bytes, request_id: str, deadline_s: float, failed_url: str) -> object:
        is_settled = False
        try:
            endpoint = self._next_endpoint(failed_url)
            found = await self._post(endpoint, data, request_id, deadline_s)
            is_settled = True
        finally:
            if not is_settled:
                self._breaker.given_up()
        if isinstance(found, _Failure):
            found = found._replace(url="" if endpoint is None else endpoint.url)
        if not isinstance(found, _Failure) or (found.is_final and not found.counts):
            self._breaker.answered()
        elif found.counts and (found.reached or not self._returns):
            self._breaker.failed()
        else:
            self._breaker.given_up()
        return found

    def _next_endpoint(self, failed_url: str) -> Endpoint | None:
        """None: there is none at the moment."""
        endpoints = self._endpoints()
        if len(endpoints) > 1:
            endpoints = [each for each in endpoints if each.url != failed_url]
        if not endpoints:
            return None
        self._turn += 1
        return endpoints[(self._turn - 1) % len(endpoints)]

    async def _post(self, endpoint: Endpoint | None, data: bytes, request_id: str, deadline_s: float) -> object:
        if endpoint is None:
            return _Failure("there is no engine to ask at the moment", is_final=False, reached=False)
        url = endpoint.url
        limit_s = min(self._options.request_timeout_s, max(0.001, deadline_s - time.monotonic()))
        headers = {**self._headers, "Idempotency-Key": request_id}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        try:
            async with asyncio.timeout(limit_s):
                session = self._session or self._open()
                async with session.post(url, data=data, headers=headers, allow_redirects=False) as reply:
                    return await self._read(reply)
        except TimeoutError:
            return _Failure(f"no answer within {limit_s:.3g} s", is_final=False)
        except aiohttp.ClientConnectorError as error:
            return _Failure(f"{url} cannot be reached: {error.os_error}", is_final=False, reached=False)
        except (aiohttp.InvalidURL, UnicodeError):
            return _Failure(f"{url!r} is no address", is_final=True)
        except (aiohttp.ClientError, OSError) as error:
            return _Failure(f"the connection broke: {type(error).__name__}: {error}", is_final=False)

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=self._options.max_concurrent, keepalive_timeout=30.0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=True
        )
        return self._session

    async def _read(self, reply: aiohttp.ClientResponse) -> object:
        body = await self._body(reply)
        if body is None:
            return _Failure(f"the answer has more than {self._options.max_answer_bytes} bytes", is_final=True)
        if reply.status != 200:
            shown = body[:MAX_SHOWN_BYTES].decode(errors="replace").strip()
            text = f"HTTP {reply.status}" + (f": {shown}" if shown else "")
            return _Failure(
                text,
                is_final=reply.status not in MAY_PASS,
                reached=reply.status not in WAS_REFUSED,
                wait_s=_retry_after_s(reply.headers.get("Retry-After", "")),
                counts=reply.status in MAY_PASS and reply.status != 429,
            )
        try:
            return msgspec.json.decode(body)
        except UNREADABLE:
            shown = body[:MAX_SHOWN_BYTES].decode(errors="replace")
            return _Failure(f"the answer is no JSON: {shown!r}", is_final=True)

    async def _body(self, reply: aiohttp.ClientResponse) -> bytes | None:
        """None when it is too long."""
        chunks = bytearray()
        async for chunk in reply.content.iter_any():
            chunks += chunk
            if len(chunks) > self._options.max_answer_bytes:
                return None
        return bytes(chunks)


def _authorization(variable: str | None, what: str) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserCodeError(
            f"{what}.auth_env: the environment variable {variable} is not set where the reward runs (the node of the "
            "scorer); export it before `penstock run`, or remove the key"
        )
    return {"Authorization": f"Bearer {key}"}


def _retry_after_s(text: str) -> float:
    """The header as seconds; 0 when it says nothing."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _after(last: str) -> str:
    return f"; the last failure: {last}" if last else ""
