"""The images of one request, ready to be looked at, and the stretches of contexts that they are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.vision.places import Placed
    from penstock.backends.vision.processor import Patches


class Sight(NamedTuple):
    """Where the images of a prompt stand, and what is on them."""

    placed: Placed
    patches: Sequence[Patches]


class Stretch(NamedTuple):
    """Tokens of a context that are to enter the cache of a slot."""

    slot: int
    start: int
    tokens: list[int]
    is_fresh: bool
    """Nothing stands before it, and it is no part of a response."""
    sight: Sight | None
    """The images of its prompt."""
