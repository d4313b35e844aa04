"""Image files, which nobody trusts: what is in them is found out here, and nowhere else.

Invariants:

* Bytes are counted before they are read, and pixels, as the file's head gives them, before one is decoded.
* Only the decoders of :data:`FORMATS` are tried; none of them draws, runs or fetches anything.
* What is read again later is read only if it is the same, by its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

from PIL import Image, ImageOps, UnidentifiedImageError

from penstock.backends.durable import sync
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.messages.samples import Media

THUMBNAIL_SIDE: Final = 64
THUMBNAIL_SOURCE_BYTES: Final = 20_000_000
THUMBNAIL_SOURCE_PIXELS: Final = 16_777_216
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


_DAMAGED: Final = (
    OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
"""What Pillow raises of files that nobody has made right: of pixels, and of the facts beside them (EXIF)."""


class BadPictureError(UserFault):
    """Bytes that are no image, or a larger one than is allowed."""


class PictureFacts(NamedTuple):
    """What is known of an image that was decoded once."""

    width: int
    height: int
    digest: str
    """SHA-256 of its bytes."""


def picture_facts(data: bytes, max_pixels: int) -> PictureFacts:
    """Decode an image for the first time.

    Raises:
        BadPictureError: it is none, is damaged, or has more than ``max_pixels``.
    """
    image = _decoded(data, max_pixels)
    return PictureFacts(image.width, image.height, hashlib.sha256(data).hexdigest())


def read_picture(media: Media, max_pixels: int | None = None) -> Image.Image:
    """An image of a prompt, which was found to be good when the rows were read.

    Raises:
        BadPictureError: its file is gone, or is another one now.
    """
    try:
        data = Path(media.reference).read_bytes()
    except OSError as error:
        raise BadPictureError(f"{media.reference} cannot be read any more: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != media.digest:
        raise BadPictureError(f"{media.reference} is not the image that it was when the rows were read; put it back")
    return _decoded(data, max_pixels)


def thumbnail(media: Media) -> tuple[int, int, bytes] | None:
    """Width, height and RGBA pixels of a small picture of an image; None: it is gone, or is not what it was."""
    try:
        path = Path(media.reference)
        if not path.is_file() or path.stat().st_size > THUMBNAIL_SOURCE_BYTES:
            return None
        image = read_picture(media, THUMBNAIL_SOURCE_PIXELS)
    except (OSError, ValueError, BadPictureError):
        return None
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return image.width, image.height, image.convert("RGBA").tobytes()


def keep_picture(folder: Path, data: bytes, digest: str, *, is_synced: bool = False) -> Path:
    """The file, named by its digest, that an image which came without one is kept in. Several processes may do so.
    ``is_synced``: it is on disk when this returns."""
    path = folder / digest
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{digest}.{uuid4().hex}"
        made.write_bytes(data)
        if is_synced:
            sync(made)
        os.replace(made, path)
        if is_synced:
            sync(folder)
    return path


def _decoded(data: bytes, max_pixels: int | None) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise BadPictureError(
                f"an image of {image.width} x {image.height} pixels; at most {max_pixels} are allowed "
                "(data.max_image_pixels)"
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise BadPictureError(f"no image of the kinds {', '.join(FORMATS)}") from None
    except _DAMAGED as error:
        raise BadPictureError(f"an image that cannot be decoded: {error}") from error
