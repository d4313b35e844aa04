"""Many waits of one kind, said in few words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.waits import Wait

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NAMED: Final = 3


def several(what: str, on: str, subjects: Sequence[tuple[object, int]]) -> list[Wait]:
    """Waits for these (subject, mark), the oldest first: the first few by name, the last of them for all the others.
    So a wait that lasts stays among those that are named."""
    waits = [Wait(what, str(subject), on, mark) for subject, mark in subjects[:MAX_NAMED]]
    num_unnamed = len(subjects) - len(waits)
    if num_unnamed:
        waits[-1] = msgspec.structs.replace(waits[-1], num=1 + num_unnamed)
    return waits
