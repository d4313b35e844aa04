"""Reads files of JSON lines while they are written."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.runtime.observability.segments import newer_segments, opened
from penstock.runtime.observability.trackers import METRICS_FILE, StepRow, is_evaluation_line

if TYPE_CHECKING:
    from pathlib import Path


class LineFollower:
    """Reads a file as it grows."""

    def __init__(self, path: Path, position: int = 0) -> None:
        """
        Args:
            path: the file, which may come later.
            position: byte to begin at.
        """
        self.path = path
        self.position = position
        """In the file that was read last, of which segments are closed while it is followed."""
        self._segment = 0
        """The last one that was read to its end."""

    def more(self) -> list[bytes]:
        """The whole lines that were written since the last call."""
        found: list[bytes] = []
        with suppress(FileNotFoundError):
            for number, _, file in opened(self.path, self._segment):
                with file:
                    if number is not None and number > self._segment + 1:
                        self.position = 0  # what was being read is gone
                    file.seek(self.position)
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]  # a line without its end may be torn, or is being written
                found += whole.splitlines()
                self.position += len(whole)
                if number is not None:
                    self._segment, self.position = number, 0
        return found

    def has_shrunk(self) -> bool:
        """Whether another file has taken its place."""
        try:
            return self.path.stat().st_size < self.position and not newer_segments(self.path, self._segment)
        except FileNotFoundError:
            return False


class StepFollower:
    """Reads the steps of a run as they come."""

    def __init__(self, run_folder: Path) -> None:
        self._lines = LineFollower(run_folder / METRICS_FILE)
        self._version = -1

    def more(self) -> list[StepRow]:
        """Those that were recorded since the last call. A version that is trained again comes once.

        Raises:
            UserFault: the file is damaged.
        """
        found: list[StepRow] = []
        for line in self._lines.more():
            if is_evaluation_line(line):
                continue
            try:
                row = msgspec.json.decode(line, type=StepRow)
            except UNREADABLE as error:
                raise UserFault(f"{self._lines.path}, before byte {self._lines.position}: {error}") from error
            if row.version > self._version:
                self._version = row.version
                found.append(row)
        return found
