"""How much of the disk a run's folder of images may take.

Nothing is removed from it while the run goes on: samples that are still to be trained, episodes that may go on
elsewhere and the archive name its files, and no process knows of all of them. So what is bounded is what is added.

Invariants:

* Who adds an image counts what lies in the folder, and again after each :data:`RECOUNTED` of the limit that it has
  added itself. So several processes together go over the limit by that share for each of them, and by what is being
  written while one counts; and the folder is not counted for every image.
* A folder that seems full is counted anew before an image is refused: a person may have made room.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

RECOUNTED: Final = 1 / 64


class NoRoomError(Exception):
    """The run keeps no further image. It is nobody's fault who shows one: the message names the key. (HTTP 507)"""


class ImageRoom:
    """Of one folder, as one process counts it. From any thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._counted: int | None = None
        """Bytes that lay there when they were counted last."""
        self._added = 0
        """Since then."""

    def add(self, size_bytes: int) -> None:
        """An image is going to be put there.

        Raises:
            NoRoomError: it is too much.
        """
        with self._lock:
            if self._counted is None or self._added >= self._max_bytes * RECOUNTED:
                self._count()
            if not self._fits(size_bytes):
                self._count()
            if not self._fits(size_bytes):
                raise NoRoomError(
                    f"the images of this run ({self._folder}) have come to episode.max_images_gb "
                    f"({self._max_bytes / 1e9:g}), and none is removed while it goes on, as samples name them; raise "
                    "it and resume the run, or show fewer or smaller images"
                )
            self._added += size_bytes

    def _fits(self, size_bytes: int) -> bool:
        return (self._counted or 0) + self._added + size_bytes <= self._max_bytes

    def _count(self) -> None:
        self._counted = self._added = 0
        try:
            with os.scandir(self._folder) as entries:
                self._counted = sum(map(_size_of, entries))
        except FileNotFoundError:
            return  # nothing was kept yet


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # it was given its name in this moment
        return 0
