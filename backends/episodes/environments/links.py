"""How requests come to a server of the OpenEnv protocol: over HTTP, or over one WebSocket for each episode.

Invariants:

* A request has a deadline, and ends in a reply or in a :class:`LinkError` that says whether the server can have acted
  on it.
* A reply is read up to ``MAX_REPLY_BYTES`` and decoded into its type; anything else is an error, a redirection too:
  it would say where the run's headers go, and whom this machine asks.

Waits: each ``ask`` ends with the server's reply, the connection's end, or its ``timeout_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

import aiohttp
import msgspec

from penstock.backends.episodes.interfaces import JsonObject
from penstock.messages.base import UNREADABLE
from penstock.messages.texts import without_credentials

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_REPLY_BYTES: Final = 8 << 20
MAX_QUOTED_CHARS: Final = 300
CLOSE_TIMEOUT_S: Final = 1.0
"""For the server to take its leave as well; a request that has run into its deadline waits that much longer."""
_TRY_LATER: Final = (429, 503)
"""The server has not begun with it."""
_MALFORMED: Final = (400, 422)
_CAPACITY: Final = "CAPACITY_REACHED"
_VALIDATION: Final = "VALIDATION_ERROR"

Kind = Literal["reset", "step", "state"]
ReplyT = TypeVar("ReplyT")


class Outcome(msgspec.Struct, frozen=True):
    """What follows from an action, or from beginning."""

    observation: JsonObject
    reward: float | bool | None = None
    done: bool = False


class _SocketReply(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _SocketError(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""


class LinkError(Exception):
    """A request without a reply that can be used."""

    def __init__(self, message: str, *, is_done_never: bool = False, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_done_never = is_done_never
        """The server has certainly not acted on it: it may be sent again, whatever it is."""
        self.is_refused = is_refused
        """The server says that the request is malformed, or that it is not the one to ask."""


class Link(Protocol):
    """One episode's way to its server."""

    async def ask(self, kind: Kind, body: JsonObject, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """Send this, and wait for the reply.

        Raises:
            LinkError: there is none.
        """
        ...

    async def close(self) -> None:
        """No more requests."""
        ...


async def refuse_redirected_socket(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A middleware of the session: the handshake of a WebSocket follows redirections, and has no argument against it.

    Raises:
        aiohttp.WSServerHandshakeError: the answer is one.
    """
    response = await send(request)
    if 300 <= response.status < 400 and request.headers.get("Upgrade", "").lower() == "websocket":
        response.close()
        raise aiohttp.WSServerHandshakeError(response.request_info, response.history, status=response.status)
    return response


class HttpLink:
    """``POST /reset``, ``POST /step``, ``GET /state``, over connections that all episodes share."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], base_url: str) -> None:
        self._session = session
        self._base_url = base_url

    async def ask(self, kind: Kind, body: JsonObject, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """See :class:`Link`."""
        what = f"{kind} of the environment at {without_credentials(self._base_url)}"
        method, data = ("GET", None) if kind == "state" else ("POST", msgspec.json.encode(body))
        status, content = await _in_time(self._exchanged(method, f"/{kind}", data), what, timeout_s)
        if status == 200:
            return _decoded(content, reply, what)
        hint = "; is this the address of an OpenEnv server?" if status in (404, 405) else ""
        raise LinkError(
            f"{what} was answered {status}: {_quoted(content)}{hint}",
            is_done_never=status in _TRY_LATER,
            is_refused=status in _MALFORMED,
        )

    async def close(self) -> None:
        """See :class:`Link`; the connections are the others' too."""

    async def _exchanged(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        url = self._base_url + path
        asked = self._session().request(method, url, data=data, headers=headers, allow_redirects=False)
        async with asked as response:
            content = await response.content.read(MAX_REPLY_BYTES)
            while not response.content.at_eof():
                more = await response.content.read(MAX_REPLY_BYTES)
                content += more
                if len(content) > MAX_REPLY_BYTES:
                    raise LinkError(f"{without_credentials(url)}: the reply has more than {MAX_REPLY_BYTES} bytes")
            return response.status, content


class SocketLink:
    """``/ws``: one WebSocket, and with it one environment of the server's, for each episode."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], base_url: str) -> None:
        self._session = session
        self._base_url = base_url
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, kind: Kind, body: JsonObject, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """See :class:`Link`. A step is the action alone here: this protocol has no place for what is around it."""
        what = f"{kind} of the environment at {without_credentials(self._base_url)}"
        sent: JsonObject = {"type": kind}
        if kind != "state":
            sent["data"] = body["action"] if kind == "step" else body
        try:
            content = await _in_time(self._exchanged(kind, msgspec.json.encode(sent), what), what, timeout_s)
        except LinkError:
            await self.close()  # what it still may answer would be taken for the next reply
            raise
        framed = _decoded(content, _SocketReply, what)
        if framed.type == "error":
            await self._refuse(framed, what)
        expected = "state" if kind == "state" else "observation"
        if framed.type != expected:
            raise LinkError(f"{what}: expected a message of type {expected!r}, got {framed.type!r}")
        return _decoded(bytes(framed.data), reply, what)

    async def close(self) -> None:
        """See :class:`Link`; the server ends its environment with the connection."""
        socket, self._socket = self._socket, None
        if socket is not None and not socket.closed:
            # One that has stopped reads no farewell; cancelled, aiohttp cuts it off.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await socket.close()

    async def _refuse(self, framed: _SocketReply, what: str) -> None:
        error = _decoded(bytes(framed.data), _SocketError, what)
        is_full = error.code == _CAPACITY
        if is_full:
            await self.close()
        raise LinkError(
            f"{what} was answered {error.code or 'an error'}: {error.message[:MAX_QUOTED_CHARS]}",
            is_done_never=is_full,
            is_refused=error.code == _VALIDATION,
        )

    async def _exchanged(self, kind: Kind, data: bytes, what: str) -> bytes:
        if self._socket is None or self._socket.closed:
            if kind != "reset":
                raise LinkError(f"{what}: the connection is gone, and the environment with it")
            url = "ws" + self._base_url.removeprefix("http") + "/ws"
            try:
                self._socket = await self._session().ws_connect(url, max_msg_size=MAX_REPLY_BYTES, heartbeat=30.0)
            except aiohttp.WSServerHandshakeError as error:
                raise LinkError(
                    f"{what} was answered {error.status} instead of a WebSocket; is this the address of an OpenEnv "
                    "server that has /ws?",
                    is_done_never=error.status in _TRY_LATER,
                    is_refused=300 <= error.status < 400,  # another handshake is redirected too
                ) from None
        await self._socket.send_str(data.decode())
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            return str(message.data).encode()
        why = self._socket.exception() or f"{message.type.name}, code {self._socket.close_code}"
        raise LinkError(f"{what}: the server closed the connection ({why})")


async def _in_time(exchange: Awaitable[ReplyT], what: str, timeout_s: float) -> ReplyT:
    try:
        async with asyncio.timeout(timeout_s):
            return await exchange
    except TimeoutError:
        raise LinkError(f"{what} was not answered within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise LinkError(f"{what}: {error}", is_done_never=True) from None
    except (aiohttp.ClientError, OSError) as error:
        raise LinkError(f"{what}: the connection broke off ({type(error).__name__}: {error})") from None


def _decoded(content: bytes, reply: type[ReplyT], what: str) -> ReplyT:
    try:
        return msgspec.json.decode(content, type=reply)
    except UNREADABLE as error:
        raise LinkError(f"{what}: the reply is none of this protocol: {error}; it begins {_quoted(content)}") from None


def _quoted(content: bytes) -> str:
    return content[:MAX_QUOTED_CHARS].decode(errors="replace").strip() or "(nothing)"
