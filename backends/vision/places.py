"""Where images stand among the tokens of a prompt or response, and what positions tokens have beside them.

Axis letters: ``P`` tokens of a prompt, or of a response.

Invariants:

* Images stand where it is said, in prompts and in what an episode puts between the model's turns. The same token id
  anywhere else is a token that the model has drawn, and text.
* Positions are those of transformers' ``get_rope_index``; without images all three are a token's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.messages.samples import Media


class Placed(NamedTuple):
    """The images of a prompt, or of a response, among its tokens."""

    at: NDArray[np.int64]
    """Tokens that stand for squares of patches, in their order."""
    positions: NDArray[np.int64]
    """``[3, P]``: by time, row and column."""
    shift: int
    """What is added to the place of each token after them."""


def expanded(ids: Sequence[int], image_token_id: int, media: Sequence[Media]) -> tuple[list[int], tuple[Media, ...]]:
    """The tokens of a prompt with as many for each image as it has squares, where the template wrote one; and the
    images with their places.

    Raises:
        UserFault: the template wrote more or fewer, or ends with one.
    """
    num_found = sum(token == image_token_id for token in ids)
    if num_found != len(media):
        raise UserFault(f"the chat template wrote {num_found} places for {len(media)} images; use that of the model")
    if media and ids[-1] == image_token_id:
        raise UserFault("the prompt ends with an image; the chat template has to end with where the answer begins")
    whole: list[int] = []
    at: list[Media] = []
    for token in ids:
        if token == image_token_id:
            at.append(media[len(at)].moved(len(whole) - media[len(at)].at))
        whole += [token] * (at[-1].num_tokens if token == image_token_id else 1)
    return whole, tuple(at)


def placed(
    ids: NDArray[np.int32],
    image_token_id: int,
    media: Sequence[Media],
    grids: Sequence[tuple[int, int, int]],
    merge_size: int,
    *,
    first: int = 0,
) -> Placed:
    """Where the images stand in ``ids [P]``, of which the first has the position ``first``.

    Raises:
        UserFault: the tokens there are no places for images, or an image has more or fewer squares.
    """
    sides = [(time, height // merge_size, width // merge_size) for time, height, width in grids]
    positions = np.empty((3, len(ids)), dtype=np.int64)
    at = [np.zeros(0, dtype=np.int64)]
    done, next_position = 0, first
    for each, (time, height, width) in zip(media, sides, strict=True):
        begin, end = each.at, each.at + each.num_tokens
        num_places = int((ids[begin:end] == image_token_id).sum()) if begin >= done else 0
        if not num_places == each.num_tokens == time * height * width:
            raise UserFault(
                f"an image has {num_places} places among the tokens from {begin} on, and {time * height * width} "
                "squares of patches; is the image processor of the model the one that the rows were read with?"
            )
        positions[:, done:begin] = np.arange(next_position, next_position + begin - done)
        next_position += begin - done
        positions[:, begin:end] = next_position + np.indices((time, height, width)).reshape(3, -1)
        next_position += max(height, width)
        at.append(np.arange(begin, end))
        done = end
    positions[:, done:] = np.arange(next_position, next_position + len(ids) - done)
    return Placed(np.concatenate(at), positions, next_position - first - done)
