"""Images, videos and sounds that rows name by their address: fetched here, handed to the server as bytes.

A server that fetches them itself goes wherever it is redirected, for as many bytes as there are.

Invariants:

* Every address that is asked, one it is redirected to as well, is of a host that the scenario names.
* Of each no more is read than the scenario allows.

| waits for | who ends it |
|---|---|
| what an address holds | its host; ``FETCH_TIMEOUT_S``, or the deadline of the request |
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
from msgspec.structs import replace
from yarl import URL

from penstock.backends.data.media import data_address, host_of
from penstock.backends.engines.served.base.http import BadReply

if TYPE_CHECKING:
    from penstock.backends.data.options import DataOptions
    from penstock.messages.samples import Media

FETCH_TIMEOUT_S: Final = 60.0
"""For one of them."""
MAX_HOPS: Final = 5
READ_BYTES: Final = 1 << 16
_REDIRECTIONS: Final = frozenset({301, 302, 303, 307, 308})


class MediaFetcher:
    """Of the rows of one run."""

    def __init__(self, options: DataOptions) -> None:
        self._hosts = options.media_hosts
        self._max_bytes = options.max_media_bytes

    async def fetched(self, media: tuple[Media, ...], timeout_s: float) -> tuple[Media, ...]:
        """The same, with ``data:…;base64,…`` in the place of each address.

        Raises:
            BadReply: one cannot be fetched.
        """
        found: list[Media] = []
        async with aiohttp.ClientSession(headers={"Accept-Encoding": "identity"}, trust_env=True) as session:
            for each in media:
                if each.reference[:4].lower() == "http":
                    try:
                        async with asyncio.timeout(min(timeout_s, FETCH_TIMEOUT_S)):
                            each = await self._fetched(session, each)
                    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                        why = error if str(error) else type(error).__name__
                        raise BadReply(f"{each.kind} {each.reference[:200]} cannot be fetched: {why}") from None
                found.append(each)
        return tuple(found)

    async def _fetched(self, session: aiohttp.ClientSession, media: Media) -> Media:
        url = URL(media.reference)
        for _ in range(MAX_HOPS):
            host = host_of(str(url))
            if host is None or host not in self._hosts:
                raise ValueError(f"it is redirected to {str(url)[:200]}, which is at no host of data.media_hosts")
            async with session.get(url, allow_redirects=False) as reply:
                if reply.status in _REDIRECTIONS:
                    url = url.join(URL(reply.headers.get("Location", "")))
                    continue
                if reply.status != 200:
                    raise ValueError(f"{host} answers {reply.status}")
                data = bytearray()
                async for piece in reply.content.iter_chunked(READ_BYTES):
                    data += piece
                    if len(data) > self._max_bytes:
                        raise ValueError(f"it has more than {self._max_bytes} bytes (data.max_media_bytes)")
                return replace(media, reference=data_address(bytes(data)))
        raise ValueError(f"it is redirected {MAX_HOPS} times")
