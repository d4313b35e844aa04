"""The images of one request, ready to be looked at."""

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
