"""What has changed between two versions of the weights: exactly, and in few bytes where few have.

At a learning rate of 1e-6 a step moves a weight by about that, and bfloat16 keeps eight bits of it: four weights in a
hundred come out as another number, most of them as the next one. That fits into a thirtieth of the bytes.

Both versions are read as words of two bytes, whatever is in them. The form, compressed by zlib: for each changed word
how many unchanged ones lie before it, as one byte, or as bytes of 255 before the one that holds the rest; then by how
much each grew (modulo 2¹⁶), all low bytes before all high ones.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

WORD_BYTES: Final = 2
FULL: Final = 255
"""A byte of a gap that goes on in the next."""
FASTEST: Final = 1


class Changes(NamedTuple):
    """Of one range of bytes."""

    num_words: int
    """That changed."""
    data: bytes


def changes_between(before: torch.Tensor, after: torch.Tensor) -> Changes | None:
    """What makes ``after`` of ``before``, both uint8 of the same even number of bytes on one device; None where that
    takes more bytes than ``after`` itself."""
    old, new = before.view(torch.int16), after.view(torch.int16)
    places = torch.nonzero(new != old).flatten()
    grown = (new[places] - old[places]).cpu().numpy().view(np.uint8).reshape(-1, WORD_BYTES)
    packed = zlib.compress(_packed_gaps(places.cpu().numpy()) + grown.T.tobytes(), FASTEST)
    return Changes(len(grown), packed) if len(packed) < len(after) else None


def apply_changes(data: memoryview[int], changes: bytes | memoryview[int], num_words: int) -> None:
    """Make the new bytes of the old ones, in place.

    Raises:
        ValueError: these are no changes of so many bytes.
    """
    words = np.frombuffer(data, np.int16)
    most_bytes = num_words * (WORD_BYTES + 1) + len(words) // FULL + 1
    if not 0 <= num_words <= len(words):
        raise ValueError(f"there are no {num_words} changes in {len(data)} bytes")
    unpacking = zlib.decompressobj()
    try:
        packed = np.frombuffer(unpacking.decompress(changes, most_bytes), np.uint8)
    except zlib.error as error:
        raise ValueError(f"these are no changes: {error}") from None
    gaps, grown = np.split(packed, [max(0, len(packed) - num_words * WORD_BYTES)])
    places = _places_of(gaps)
    if not unpacking.eof or len(places) != num_words or (num_words and places[-1] >= len(words)):
        raise ValueError(f"{len(changes)} bytes are no {num_words} changes within {len(data)} bytes")
    words[places] += np.ascontiguousarray(grown.reshape(WORD_BYTES, -1).T).view(np.int16).reshape(-1)


def _packed_gaps(places: npt.NDArray[np.int64]) -> bytes:
    gaps = np.diff(places, prepend=-1) - 1
    num_full = gaps // FULL
    packed = np.full(len(gaps) + int(num_full.sum()), FULL, np.uint8)
    packed[np.arange(len(gaps)) + np.cumsum(num_full)] = gaps % FULL
    return packed.tobytes()


def _places_of(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """One for each byte that ends a gap; each is one further than the gaps up to it add up to."""
    ends = np.flatnonzero(packed != FULL)
    return np.cumsum(packed, dtype=np.int64)[ends] + np.arange(len(ends))
