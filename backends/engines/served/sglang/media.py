"""What belongs to a prompt and is no text, as the server takes it: ``image_data``, ``video_data``, ``audio_data``.

The prompt travels as token ids with one placeholder for each image, as the chat template wrote it. The server makes of
each as many as its processor needs for the image's size and leaves all other ids as they are; a number of placeholders
that is not that of the images it refuses.

Where a learner looks at the images too, or an episode goes on behind them, prompts hold all those tokens already. They
are taken out again, and the server has to count as many tokens in the end as there were. A token of images that the
model itself has drawn cannot be told from a placeholder, so such a prompt is not sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from penstock.backends.engines.served.base.generator import DrawnImageError
from penstock.backends.engines.served.base.http import BadReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.samples import Media


def media_fields(media: Sequence[Media]) -> tuple[tuple[str, msgspec.Raw], ...]:
    """Fields of the request's body, by name, as JSON."""
    fields: dict[str, list[str]] = {}
    for each in media:
        fields.setdefault(f"{each.kind}_data", []).append(_reference(each))
    return tuple((name, msgspec.Raw(msgspec.json.encode(references))) for name, references in fields.items())


def are_placed(media: Sequence[Media]) -> bool:
    """Whether the prompt holds all tokens of these."""
    return any(each.num_tokens for each in media)


def as_written(ids: list[int], media: Sequence[Media]) -> list[int]:
    """The ids with one placeholder for each image, of which they hold all tokens.

    Raises:
        DrawnImageError: the model has drawn the token that stands for images.
    """
    token = ids[media[0].at]
    written: list[int] = []
    done = 0
    for each in media:
        written += [*_text(ids[done : each.at], token, done), token]
        done = each.at + each.num_tokens
    return written + _text(ids[done:], token, done)


def _text(ids: list[int], image_token: int, begin: int) -> list[int]:
    """A stretch between images, which begins at this place."""
    if image_token in ids:
        raise DrawnImageError(image_token, begin + ids.index(image_token))
    return ids


def check_count(num_sent: int, num_read: int) -> None:
    """Whether the server has read the prompt that the learner trains on.

    Raises:
        BadReply: it has put more or fewer tokens in the places of images.
    """
    if num_read != num_sent:
        raise BadReply(
            f"the server counts {num_read} tokens of a prompt with images that has {num_sent}: it makes others of them "
            "than preprocessor_config.json of model.path says; look at the folder that it was started from and at its "
            "options about images"
        )


def _reference(media: Media) -> str:
    """Addresses and data as they are. A path becomes ``file://``, since the server tries to read one whose name has no
    known ending as base64."""
    return f"file://{quote(media.reference)}" if media.reference.startswith("/") else media.reference
