"""Reads files of JSON lines while they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.messages.errors import UserFault
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

    def more(self) -> list[bytes]:
        """The whole lines that were written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # a line without its end may be torn, or is being written
        self.position += len(whole)
        return whole.splitlines()


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
            except msgspec.DecodeError as error:
                raise UserFault(f"{self._lines.path}, before byte {self._lines.position}: {error}") from error
            if row.version > self._version:
                self._version = row.version
                found.append(row)
        return found
