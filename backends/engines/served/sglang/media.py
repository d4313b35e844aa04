"""What belongs to a prompt and is no text, as the server takes it: ``image_data``, ``video_data``, ``audio_data``.

The prompt travels as token ids with one placeholder for each image, as the chat template wrote it. The server makes of
each as many as its processor needs for the image's size and leaves all other ids as they are; a number of placeholders
that is not that of the images it refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.samples import Media


def media_fields(media: Sequence[Media]) -> tuple[tuple[str, msgspec.Raw], ...]:
    """Fields of the request's body, by name, as JSON."""
    fields: dict[str, list[str]] = {}
    for each in media:
        fields.setdefault(f"{each.kind}_data", []).append(_reference(each))
    return tuple((name, msgspec.Raw(msgspec.json.encode(references))) for name, references in fields.items())


def _reference(media: Media) -> str:
    """Addresses and data as they are. A path becomes ``file://``, since the server tries to read one whose name has no
    known ending as base64."""
    return f"file://{quote(media.reference)}" if media.reference.startswith("/") else media.reference
