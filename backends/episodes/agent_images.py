"""Images in the requests of outside agents, which become images of their episode.

Invariants:

* A request has its images in itself, as ``data:…;base64,…``. Nothing is fetched, and no file and no image of another
  session can be named: an agent sees what it has sent, and what stands in its prompt.
* A request has no more images than a prompt may have tokens, as each becomes one at least; further ones are not even
  decoded.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from penstock.backends.data.media import data_address
from penstock.backends.episodes.api import ChatMessage, ContentPart
from penstock.backends.episodes.dialogue import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.backends.episodes.api import JsonObject
    from penstock.backends.episodes.images import EpisodeImages
    from penstock.messages.samples import Media

MAX_SHOWN: Final = 40
_KINDS: Final = ("image", "image_url")


class AgentImages:
    """Those of one session."""

    def __init__(
        self,
        taker: Callable[[Sequence[Media]], EpisodeImages] | None,
        of_prompt: tuple[Media, ...],
        max_images: int,
    ) -> None:
        """
        Args:
            taker: See :class:`~penstock.backends.episodes.sessions.Rules`.
            of_prompt: that the sample's prompt has.
            max_images: of one request.
        """
        self._of_prompt, self._max_images = of_prompt, max_images
        self._images = None if taker is None else taker(of_prompt)

    @property
    def are_shown(self) -> bool:
        """Whether the run shows any."""
        return self._images is not None

    async def kept(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages of a request with a reference in the place of each image, which is kept.

        Raises:
            MalformedError: the run shows none, one cannot be used or would have to be fetched, or they are too many.
        """
        found = sum(part.type in _KINDS for message in messages for part in _parts(message))
        if found > self._max_images:
            raise MalformedError(f"messages: {found} images are too many for model.max_context of {self._max_images}")
        return [await self._kept(message, place) for place, message in enumerate(messages)] if found else list(messages)

    def placed(self, tokens: list[int], messages: Sequence[ChatMessage]) -> tuple[list[int], tuple[Media, ...]]:
        """See :class:`~penstock.backends.episodes.images.EpisodeImages`."""
        return (tokens, ()) if self._images is None else self._images.placed(tokens, messages)

    async def of_task(self, messages: bytes) -> bytes:
        """The messages of the prompt, JSON, with its images in themselves: as a request may have them.

        Raises:
            MalformedError: an image is not what it was when the rows were read.
        """
        if not self._of_prompt or self._images is None:
            return messages
        addresses = [await asyncio.to_thread(_address, each) for each in self._of_prompt]
        left = iter(addresses)
        rows: list[JsonObject] = msgspec.json.decode(messages, type=list[dict[str, object]])
        return msgspec.json.encode([_with_addresses(message, left) for message in rows])

    async def _kept(self, message: ChatMessage, place: int) -> ChatMessage:
        parts = _parts(message)
        if not any(part.type in _KINDS for part in parts):
            return message
        if self._images is None:
            raise MalformedError(
                f"messages[{place}]: the run shows no images; set episode.images: true, for a model that sees"
            )
        if message.role == "assistant":
            raise MalformedError(f"messages[{place}]: the model makes no images, so no message of it has one")
        kept: list[ContentPart] = []
        for part in parts:
            if part.type in _KINDS:
                reference = await self._images.reference(_data_of(part, place), place)
                part = ContentPart("image", image=reference)
            kept.append(part)
        return msgspec.structs.replace(message, content=kept)


def _parts(message: ChatMessage) -> list[ContentPart]:
    return message.content if isinstance(message.content, list) else []


def _data_of(part: ContentPart, place: int) -> str:
    url = "" if part.image_url is msgspec.UNSET else part.image_url.url
    if url[:5].lower() != "data:":
        raise MalformedError(
            f"messages[{place}]: an image of type {part.type}: expected image_url: {{url: data:…;base64,…}}, as "
            f"nothing is fetched; found {url[:MAX_SHOWN]!r}"
        )
    return url


def _address(media: Media) -> str:
    try:
        data = Path(media.reference).read_bytes()
    except OSError as error:
        raise MalformedError(f"the prompt: {media.reference} cannot be read any more: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != media.digest:
        raise MalformedError(f"the prompt: {media.reference} is not the image that it was when the rows were read")
    return data_address(data)


def _with_addresses(message: JsonObject, left: Iterator[str]) -> JsonObject:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[JsonObject]", content)
    shown = [{"type": "image_url", "image_url": {"url": next(left)}} if p.get("type") == "image" else p for p in parts]
    return {**message, "content": shown}
