"""Changes between two publishes, worked out once for all engines that ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.weights.changes import WORD_BYTES, Changes, changes_between
from penstock.backends.weights.protocol import WeightFetchError

if TYPE_CHECKING:
    import torch

    from penstock.backends.weights.service_messages import PublishId, ReadChanges
    from penstock.backends.weights.snapshots import SnapshotShelf

MOST_KEPT_BYTES: Final = 512 << 20
"""Beyond it changes are worked out for each engine anew."""


class ChangesKept:
    """Of the last pair of publishes that was asked for: engines come to one at about the same time."""

    def __init__(self, shelf: SnapshotShelf) -> None:
        self._shelf = shelf
        self._pair: tuple[PublishId, PublishId] | None = None
        self._kept: dict[tuple[int, int], Changes | None] = {}
        self._size_bytes = 0

    def of(self, request: ReadChanges, after: torch.Tensor) -> Changes | None:
        """What makes these bytes, ``after``, of those that who asks has; None where they have to be sent whole.

        Raises:
            WeightFetchError: the range is none of whole words.
        """
        if request.start % WORD_BYTES:
            raise WeightFetchError(f"changes are asked for from byte {request.start} on, which no word begins at")
        if self._pair != (request.since, request.publish):
            self._pair, self._kept, self._size_bytes = (request.since, request.publish), {}, 0
        place = (request.start, request.size_bytes)
        if place not in self._kept:
            found = self._worked_out(request, after)
            size_bytes = len(found.data) if found else 0
            if self._size_bytes + size_bytes > MOST_KEPT_BYTES:
                return found
            self._kept[place] = found
            self._size_bytes += size_bytes
        return self._kept[place]

    def _worked_out(self, request: ReadChanges, after: torch.Tensor) -> Changes | None:
        try:
            before = self._shelf.find(request.since)
            old = before.slice(request.start, request.size_bytes)
        except WeightFetchError:  # released, of another learner, or shorter
            return None
        is_like = before.layout.size_bytes == self._shelf.find(request.publish).layout.size_bytes
        if not is_like or request.size_bytes % WORD_BYTES:
            return None
        return changes_between(old.to(after.device), after)
