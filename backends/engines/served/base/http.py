"""HTTP to one server: one session, bytes in and out, a deadline on every call, every failure of a kind.

Invariants:

* A call ends in its reply or in one :class:`CallError` whose class says what may be done about it. Only
  ``ConnectFailed`` promises that the server has seen nothing.
* Connections are not limited in number, so control calls never queue behind generation: what limits generation is
  the caller's own count of open requests.
* Every request has a connection of its own: one that meets a connection which the server is just closing (its
  keep-alive is 5 s) would be lost without a word on whether it was accepted.
* A session belongs to the event loop of its first call. Once closed it stays closed.

| waits for | who ends it |
|---|---|
| ``call`` for the reply | the server, or its own deadline |
| ``stream`` for the status line | the server, or its own deadline |
| ``EventStream.next`` for bytes | the server, or the caller's ``asyncio.timeout`` around it |

::

    CallError
    ├── ConnectFailed   no connection: nothing was sent, trying again is safe
    ├── ServerBusy      503, 504: not now
    ├── Refused         4xx, or ``success: false``: wrong request or wrong moment; the same again is refused again
    ├── ServerError     any other 5xx
    ├── CutOff          the connection was lost after the request was sent: it may have been carried out, or still run
    ├── TimedOut        no answer in time: likewise
    └── BadReply        an answer that this kind of server does not give
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping

CONNECT_TIMEOUT_S: Final = 5.0
MAX_EVENT_BYTES: Final = 256 * 1024 * 1024
"""A stream that goes on for longer without the end of an event is none."""
MAX_QUOTED: Final = 600
"""Characters of a foreign message that go into one of ours."""


class CallError(Exception):
    """A call to a server failed; see the module for the kinds."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status
        """Of HTTP; 0 where there was none."""

    def __str__(self) -> str:
        return self.message


class ConnectFailed(CallError):  # noqa: N818 - it says what happened
    """No connection could be made: nothing was sent."""


class ServerBusy(CallError):  # noqa: N818 - it says what happened
    """The server, or a router before it, does not take the request now."""


class Refused(CallError):  # noqa: N818 - it says what happened
    """The server does not take this request, and says why."""


class ServerError(CallError):
    """The server failed while it answered."""


class CutOff(CallError):  # noqa: N818 - it says what happened
    """The connection was lost after the request had been sent."""


class TimedOut(CallError):  # noqa: N818 - it says what happened
    """The deadline passed without an answer."""


class BadReply(CallError):  # noqa: N818 - it says what happened
    """The answer is not one that this kind of server gives."""


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    """The shapes in which the server words its errors."""

    error: str | _ErrorDetail | None = None
    message: str | None = None
    detail: msgspec.Raw = msgspec.Raw()


class ServerHttp:
    """One session with one server, or with a router before several."""

    def __init__(self, base_url: str, *, admin_api_key: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_api_key}"} if admin_api_key else {}
        self._opened: aiohttp.ClientSession | None = None
        self.is_closed = False

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """One request; the body of its 200.

        Raises:
            CallError: of the kind that happened.
        """
        what = f"{method} {self.base_url}{path}"
        with _translated(what, timeout_s):
            async with (
                asyncio.timeout(timeout_s),
                self._session().request(method, path, data=body, params=params, headers=_headers(body)) as response,
            ):
                data = await response.read()
        if response.status != 200:
            raise error_of(response.status, data, what)
        return data

    @asynccontextmanager
    async def stream(
        self, path: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[EventStream]:
        """A request that is answered by a stream of events; the time is that until the stream begins.

        Raises:
            CallError: of the kind that happened.
        """
        what = f"POST {self.base_url}{path}"
        with _translated(what, timeout_s):
            async with asyncio.timeout(timeout_s):
                response = await self._session().post(path, data=body, headers={**_headers(body), **(headers or {})})
                if response.status != 200:
                    async with response:
                        raise error_of(response.status, await response.read(), what)
        async with response:
            yield EventStream(response, what)

    async def close(self) -> None:
        """Close every connection; every later call fails."""
        self.is_closed = True
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    def _session(self) -> aiohttp.ClientSession:
        if self.is_closed:
            raise ConnectFailed(f"the client of {self.base_url} was closed")
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                base_url=self.base_url + "/",
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                # Deadlines are the callers'; aiohttp would end a stream after five minutes.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                read_bufsize=256 * 1024,
            )
        return self._opened


class EventStream:
    """The events of one reply, in the order in which they come."""

    def __init__(self, response: aiohttp.ClientResponse, what: str) -> None:
        self._content = response.content
        self._what = what
        self._splitter = EventSplitter()

    async def next(self) -> list[bytes] | None:
        """The payloads of the events that came since; waits for the first. None: the stream has ended as it should.

        Raises:
            CutOff: it ended otherwise.
            BadReply: it is no stream of events.
        """
        while True:
            if self._splitter.error is not None:
                raise self._splitter.error
            with _translated(self._what, 0.0):
                data = await self._content.readany()
            if not data:
                if self._splitter.is_done:
                    return None
                raise CutOff(f"{self._what}: the stream ended before its answer was complete")
            if payloads := self._splitter.feed(data):
                return payloads


class EventSplitter:
    """Server-sent events out of bytes: one ``data:`` line each, then an empty line."""

    def __init__(self) -> None:
        self.is_done = False
        """``[DONE]`` was read."""
        self.error: BadReply | None = None
        """Something else was read, after what was returned so far."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that are complete with this, up to the first thing that is none."""
        if self._rest or not data.endswith(b"\n\n"):
            searched = max(0, len(self._rest) - 1)
            self._rest += data
            end = self._rest.rfind(b"\n\n", searched)
            if end < 0:
                self._check_rest()
                return []
            data = bytes(self._rest[: end + 2])
            del self._rest[: end + 2]
        payloads: list[bytes] = []
        for event in data.split(b"\n\n"):
            if event.startswith(b"data: "):
                if event == b"data: [DONE]":
                    self.is_done = True
                else:
                    payloads.append(event[6:])
            elif event and not event.startswith(b":"):
                self.error = BadReply(f"expected an event of a stream, got {quoted(event)}")
                break
        return payloads

    def _check_rest(self) -> None:
        start = bytes(self._rest[:6])
        if not (b"data: ".startswith(start) or start.startswith(b":")) or len(self._rest) > MAX_EVENT_BYTES:
            self.error = BadReply(f"expected an event of a stream, got {len(self._rest)} bytes: {quoted(self._rest)}")


def error_of(status: int, body: bytes, what: str) -> CallError:
    """The error that a status other than 200 stands for, with the server's own words."""
    message = f"{what} was answered {status}: {_words(body)}"
    if status in (503, 504):
        return ServerBusy(message, status)
    if 400 <= status < 500:
        return Refused(message, status)
    if status >= 500:
        return ServerError(message, status)
    return BadReply(message, status)


def quoted(data: bytes | bytearray) -> str:
    """The beginning of foreign bytes, fit for a message."""
    return repr(bytes(data[:MAX_QUOTED]).decode("utf-8", "replace"))


def _words(body: bytes) -> str:
    try:
        shaped = msgspec.json.decode(body, type=_ErrorBody)
    except UNREADABLE:
        return quoted(body) if body else "without a word"
    match shaped.error:
        case str(words):
            return words[:MAX_QUOTED]
        case _ErrorDetail(message=words):
            return words[:MAX_QUOTED]
        case None:
            return (shaped.message or quoted(bytes(shaped.detail) or body))[:MAX_QUOTED]


def _headers(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"Content-Type": "application/json"}


@contextmanager
def _translated(what: str, timeout_s: float) -> Generator[None]:
    """Errors of aiohttp as ours."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
        raise ConnectFailed(f"{what}: no connection ({error})") from error
    except TimeoutError as error:
        raise TimedOut(f"{what}: no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise CutOff(f"{what}: the connection was lost before the answer was complete ({error!r})") from error
    except aiohttp.ClientError as error:
        raise BadReply(f"{what}: {error!r}") from error
