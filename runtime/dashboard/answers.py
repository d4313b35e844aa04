"""Answers that several pages share, as long as the files that they were made of have not changed.

Invariants:

* What was made, or is being made, is given to whoever asks the same while no file has changed since it was begun; a
  file that changes meanwhile makes the next question a new one. What failed is tried again.
* No more than :data:`MAX_ANSWERS` are kept: those that were asked for last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

MAX_ANSWERS: Final = 16

Stamp = tuple[int, int, int] | None


def stamp(path: Path) -> Stamp:
    """What differs after each change of a file; None where there is none, or not now."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class SharedAnswers:
    """For one event loop."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[list[Stamp], asyncio.Future[bytes]]] = {}

    def ask(
        self, question: Hashable, files: Sequence[Path], begin: Callable[[], asyncio.Future[bytes]]
    ) -> asyncio.Future[bytes]:
        """The answer made of these files, as they are now.

        Args:
            question: what is asked, of which run.
            files: all that the answer is made of.
            begin: makes it.
        """
        now = [stamp(path) for path in files]
        before, work = self._kept.pop(question, (None, None))
        if work is None or before != now or (work.done() and (work.cancelled() or work.exception() is not None)):
            work = begin()
        self._kept[question] = (now, work)
        if len(self._kept) > MAX_ANSWERS:
            del self._kept[next(iter(self._kept))]
        return work
