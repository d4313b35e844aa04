"""Takes over the server that an earlier incarnation of an EngineWorker has left, in place of a start that may take
minutes.

Invariants:

* What is taken over was launched in just this way, had taken weights or was taking some, and passed the look of its
  kind. What it holds of a load that its owner did not see end does no harm: its new owner loads all before it serves.
* Until it has taken weights of this incarnation nobody takes it over again: a server that never gets so far is started
  anew the next time.
* Whatever speaks against it ends it, and is told.

| waits for | who ends it |
|---|---|
| the guardian to hand over | :mod:`~penstock.backends.engines.served.base.launched` |
| the look | the deadlines of its calls |
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.served.base.hand_over import NotHandedOverError
from penstock.backends.engines.served.base.http import CallError
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.backends.engines.served.base.settings import ServerSettings


class LeftWeights(Value, frozen=True, kw_only=True):
    """The weights that a server serves."""

    label: str
    """What it calls them."""
    checksum: str
    """In its own layout."""


class LeftServer(Value, frozen=True, kw_only=True):
    """What a server's guardian keeps for a successor."""

    port: int
    weights: LeftWeights | None
    """What it holds; None: it loads others, of which it may hold a part."""

    def text(self) -> str:
        """One line."""
        return msgspec.json.encode(self).decode()


class TakenOver(NamedTuple):
    """What has become of it."""

    server: LaunchedServer | None
    notices: tuple[str, ...]


NOTHING_TAKEN: Final = TakenOver(None, ())


async def take_over(
    settings: ServerSettings, look_at: Callable[[LaunchedServer, LeftWeights | None], Awaitable[None]]
) -> TakenOver:
    """Take over what the owner of these settings has left, or say why it is started anew.

    Args:
        settings: how it would be launched.
        look_at: makes it clean and compares it with what it was left with; raises :class:`NotHandedOverError` or a
            :class:`CallError` against it.
    """
    began_s = asyncio.get_running_loop().time()
    try:
        server = await _taken(settings, look_at)
    except (NotHandedOverError, CallError) as error:
        return TakenOver(None, (f"its {settings.kind} server is started anew: {error}",))
    took_s = asyncio.get_running_loop().time() - began_s
    return TakenOver(server, (f"has taken over its running {settings.kind} server, in {took_s:.1f} s",))


async def _taken(
    settings: ServerSettings, look_at: Callable[[LaunchedServer, LeftWeights | None], Awaitable[None]]
) -> LaunchedServer:
    server, kept = await LaunchedServer.take_over(settings)
    try:
        server.keep("")
        if not kept:
            raise NotHandedOverError("it had taken no weights since it was started or taken over")
        left = msgspec.json.decode(kept, type=LeftServer)
        server.serves_at(left.port)
        await look_at(server, left.weights)
    except BaseException:
        await server.end()
        raise
    return server
