"""Images that engine and learner compute themselves: what the reader of the rows finds out about each.

Invariants:

* Nothing is fetched. A file lies in the folder of the rows, is counted before it is read, and decoded once here, so a
  run does not begin with an image that it cannot use.
* A reference that travels is the path of a file and the SHA-256 of its bytes. What stands in a row is kept in the run's
  folder, once.
* The tokens of a prompt are those that the model sees: as many for each image as it has squares of patches.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.data.row import BadColumnError
from penstock.backends.vision.pictures import keep_picture, picture_facts
from penstock.backends.vision.places import expanded
from penstock.backends.vision.processor import ImageProcessor
from penstock.backends.vision.room import ImageRoom
from penstock.messages.errors import UserFault
from penstock.messages.samples import Media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.checkpoint.vision_config import VisionPart

MAX_SHOWN: Final = 80
_DIGEST: Final = re.compile("[0-9a-f]{64}")


class ImageIntake:
    """Looks at the images of rows for one model."""

    def __init__(self, part: VisionPart, folder: Path | None, max_kept_bytes: int | None = None) -> None:
        """
        Args:
            part: of the model.
            folder: where images that stand in rows are kept; None: nowhere, as the rows are only looked at.
            max_kept_bytes: that may lie there before a further one of an episode is refused; None: as many as come.

        Raises:
            UserFault: the model's folder has no image processor.
        """
        self._part = part
        self._folder = folder
        self._room = None if folder is None or max_kept_bytes is None else ImageRoom(folder, max_kept_bytes)
        self._processor = ImageProcessor(part)

    def taken(self, media: Sequence[Media], max_pixels: int) -> tuple[Media, ...]:
        """References that travel, with how many tokens each image has.

        Raises:
            BadColumnError: one is no image, is too large, or would have to be fetched.
        """
        return tuple(self._taken(each, max_pixels) for each in media)

    def tokens(self, ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[Media, ...]]:
        """The tokens of a prompt, with all those of its images, and these with their places.

        Raises:
            BadColumnError: the template has not written one place for each.
        """
        try:
            return expanded(ids, self._part.image_token_id, media)
        except UserFault as error:
            raise BadColumnError("places and images differ", str(error)) from None

    def kept(self, data: bytes, max_pixels: int) -> Media:
        """An image that came in an episode, on disk in the folder, without a place.

        Raises:
            BadPictureError: it is none, or a larger one than is allowed.
            UserFault: the processor refuses its shape.
            NoRoomError: the folder is full.
        """
        assert self._folder is not None, "episodes are played in a run"
        facts = picture_facts(data, max_pixels)
        count = self._processor.num_tokens(facts.width, facts.height)
        if self._room is not None and not (self._folder / facts.digest).exists():
            self._room.add(len(data))
        path = keep_picture(self._folder, data, facts.digest, is_synced=True)
        return Media("image", str(path), facts.digest, num_tokens=count)

    def kept_before(self, digest: str, max_pixels: int) -> Media:
        """One that was kept in the folder, perhaps by another process.

        Raises:
            OSError: there is none of this name.
            UserFault: it cannot be used.
        """
        assert self._folder is not None, "episodes are played in a run"
        if not _DIGEST.fullmatch(digest):
            raise UserFault("a reference is the SHA-256 of an image of this run, in hexadecimal digits")
        return self.kept((self._folder / digest).read_bytes(), max_pixels)

    def _taken(self, media: Media, max_pixels: int) -> Media:
        shown = media.reference[:MAX_SHOWN]
        if media.kind != "image":
            raise BadColumnError(f"{media.kind} is not seen", f"{shown}: the model looks at images only")
        is_inside = media.reference[:5].lower() == "data:"
        try:
            if is_inside:
                data = base64.b64decode(media.reference.partition(",")[2])
            else:
                data = Path(media.reference).read_bytes()
            facts = picture_facts(data, max_pixels)
            count = self._processor.num_tokens(facts.width, facts.height)
        except (OSError, UserFault) as error:
            raise BadColumnError("an image cannot be used", f"{shown}: {error}") from None
        reference = media.reference
        if is_inside and self._folder is not None:
            reference = str(keep_picture(self._folder, data, facts.digest))
        return Media("image", reference, facts.digest, num_tokens=count)
