"""Images that tools, environments and functions put into an episode's messages.

Nobody trusts them: they may come from a server, or be made of what the model has said.

Invariants:

* An image is counted before it is decoded and decoded once, within the limits of the rows' images; then it is a file in
  the run's folder, named by the SHA-256 of its bytes, and in messages a reference to that. So a conversation is JSON.
* Nothing is fetched, and no file is opened that a message names: an image comes as its bytes.
* A file is on disk before a token stands for it, so that a sample in the ledger has its images after a crash.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from PIL import Image

from penstock.backends.checkpoint.vision_config import read_vision_part
from penstock.backends.data.images import ImageIntake
from penstock.backends.data.media import taken_from
from penstock.backends.data.row import BadColumnError
from penstock.backends.episodes.dialogue import MalformedError
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.backends.episodes.api import ChatMessage, JsonObject
    from penstock.backends.episodes.playing import ImageRules
    from penstock.messages.samples import Media

REFERENCE: Final = "sha256:"


def open_intake(model_folder: Path, rules: ImageRules) -> ImageIntake:
    """What looks at the images of a run's episodes."""
    part = read_vision_part(model_folder)
    assert part is not None, "the rows were read for a model that sees"
    return ImageIntake(part, Path(rules.folder), rules.max_kept_bytes)


class EpisodeImages:
    """Those of one episode."""

    def __init__(self, intake: ImageIntake, rules: ImageRules, of_prompt: Sequence[Media]) -> None:
        self._intake, self._rules = intake, rules
        self._of_prompt = tuple(of_prompt)
        self._known = {each.digest: each for each in of_prompt}

    def of_task(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """The messages of the prompt, with a reference in each place of an image."""
        left = iter(self._of_prompt)
        return [
            {**message, "content": [_referring(part, left) for part in cast("list[JsonObject]", content)]}
            if isinstance(content := message.get("content"), list)
            else message
            for message in messages
        ]

    async def kept(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """The messages with references for their images, which are kept.

        Raises:
            MalformedError: one is no image, is too large, or would have to be fetched.
            NoRoomError: the run keeps no further image.
        """
        found: list[JsonObject] = []
        for place, message in enumerate(messages):
            held: list[object] = []
            content = taken_from(message.get("content"), held)
            references = [await self.reference(value, place) for value in held]
            left = iter(references)
            if isinstance(content, list):
                parts = cast("list[JsonObject]", content)
                if sum(map(_is_bare, parts)) != len(held):
                    raise MalformedError(f"messages[{place}]: a part of type image holds no image")
                content = [{**part, "image": next(left)} if _is_bare(part) else part for part in parts]
            found.append({**message, "content": content} if held else message)
        return found

    async def reference(self, value: object, place: int) -> str:
        """For one image of ``messages[place]``, which is kept.

        Raises:
            MalformedError: as of :meth:`kept`.
        """
        return await asyncio.to_thread(self._reference, value, place)

    def placed(self, tokens: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[list[int], tuple[Media, ...]]:
        """Tokens that were rendered for these messages, with all those of their images, and these with their places.

        Raises:
            MalformedError: there are other places than images, or a reference that leads nowhere.
        """
        parts = [part for message in messages for part in message.content or () if not isinstance(part, str)]
        try:
            media = [self._media(part.image) for part in parts if part.type == "image"]
            return self._intake.tokens(tokens, media)
        except BadColumnError as error:
            raise MalformedError(f"messages: {error.message}") from None

    def _media(self, reference: str) -> Media:
        digest = reference.removeprefix(REFERENCE)
        if digest not in self._known:
            try:  # of an attempt before this one
                self._known[digest] = self._intake.kept_before(digest, self._rules.max_pixels)
            except (OSError, UserFault) as error:
                raise MalformedError(f"messages: an image {reference[:80]!r} that is not there: {error}") from None
        return self._known[digest]

    def _reference(self, value: object, place: int) -> str:
        if isinstance(value, str) and value.startswith(REFERENCE):
            self._media(value)
            return value
        try:
            data = self._bytes(value)
            digest = hashlib.sha256(data).hexdigest()
            if digest not in self._known:  # agents send all of a conversation with each request
                self._known[digest] = self._intake.kept(data, self._rules.max_pixels)
        except UserFault as error:
            raise MalformedError(f"messages[{place}]: an image cannot be used: {error}") from None
        return f"{REFERENCE}{digest}"

    def _bytes(self, value: object) -> bytes:
        limit = self._rules.max_bytes
        if isinstance(value, dict):
            value = cast("Mapping[str, object]", value).get("url")
        if isinstance(value, Image.Image):
            if value.width * value.height > self._rules.max_pixels:
                raise UserFault(f"{value.width} x {value.height} pixels are too many (data.max_image_pixels)")
            written = io.BytesIO()
            value.convert("RGB").save(written, format="PNG")
            value = written.getvalue()
        elif isinstance(value, str) and value[:5].lower() == "data:":
            if len(value) > 2 * limit + 100:
                raise UserFault(f"a text of {len(value)} characters is too long (data.max_media_bytes: {limit})")
            try:
                value = base64.b64decode(value.partition(";base64,")[2], validate=True)
            except ValueError as error:
                raise UserFault(f"data:… that is not in base64: {error}") from None
        if not isinstance(value, bytes):
            raise UserFault(
                f"found {type(value).__name__}; expected bytes, an image of Pillow, or data:…;base64,… (no file is "
                "opened and nothing is fetched that a message names)"
            )
        if not 0 < len(value) <= limit:
            raise UserFault(f"{len(value)} bytes; from 1 to {limit} are allowed (data.max_media_bytes)")
        return value


def _is_bare(part: object) -> bool:
    return cast("JsonObject", part).get("type") == "image" if isinstance(part, dict) else False


def _referring(part: JsonObject, left: Iterator[Media]) -> JsonObject:
    return {"type": "image", "image": f"{REFERENCE}{next(left).digest}"} if _is_bare(part) else part
