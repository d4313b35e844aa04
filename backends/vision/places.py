"""Where images stand among the tokens of a prompt, and what positions tokens have beside them.

Axis letters: ``P`` tokens of a prompt.

Invariants:

* Images stand in prompts only. The same token id in a response is a token that the model has drawn, and text.
* Positions are those of transformers' ``get_rope_index``; without images all three are a token's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Placed(NamedTuple):
    """The images of a prompt among its tokens."""

    at: NDArray[np.int64]
    """Tokens that stand for squares of patches, in their order."""
    positions: NDArray[np.int64]
    """``[3, P]``: by time, row and column."""
    shift: int
    """What is added to the place of each token after the prompt."""


def expanded(ids: Sequence[int], image_token_id: int, counts: Sequence[int]) -> list[int]:
    """The tokens of a prompt with as many for each image as it has squares, where the template wrote one.

    Raises:
        UserFault: the template wrote more or fewer, or ends with one.
    """
    num_found = sum(token == image_token_id for token in ids)
    if num_found != len(counts):
        raise UserFault(f"the chat template wrote {num_found} places for {len(counts)} images; use that of the model")
    if counts and ids[-1] == image_token_id:
        raise UserFault("the prompt ends with an image; the chat template has to end with where the answer begins")
    left = iter(counts)
    return [token for each in ids for token in ([each] * next(left) if each == image_token_id else [each])]


def placed(
    ids: NDArray[np.int32], image_token_id: int, grids: Sequence[tuple[int, int, int]], merge_size: int
) -> Placed:
    """Where the images stand in ``ids [P]``.

    Raises:
        UserFault: the prompt has another number of places than they have squares.
    """
    at = np.flatnonzero(ids == image_token_id)
    sides = [(time, height // merge_size, width // merge_size) for time, height, width in grids]
    counts = [time * height * width for time, height, width in sides]
    if len(at) != sum(counts):
        raise UserFault(
            f"a prompt has {len(at)} places for squares of images, and its images have {sum(counts)}; is the image "
            "processor of the model the one that the rows were read with?"
        )
    positions = np.empty((3, len(ids)), dtype=np.int64)
    done, next_position, first = 0, 0, 0
    for count, (time, height, width) in zip(counts, sides, strict=True):
        begin = int(at[first])
        positions[:, done:begin] = np.arange(next_position, next_position + begin - done)
        next_position += begin - done
        positions[:, begin : begin + count] = next_position + np.indices((time, height, width)).reshape(3, -1)
        next_position += max(height, width)
        done, first = begin + count, first + count
    positions[:, done:] = np.arange(next_position, next_position + len(ids) - done)
    return Placed(at, positions, next_position - done)
