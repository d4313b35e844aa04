"""What an engine answers with where groups are pushed from outside: the journal in the run's folder, read by number.

Invariant: nothing beyond the row that is asked for is read, as a row that is not committed may yet become another one.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.data.options import PUSHED
from penstock.backends.data.own_source.journal import ROWS_FILE
from penstock.backends.data.pushed.forms import PushedRow

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.recording import RecordedSample


class PushedResponses:
    """Of one run; the folder has to be seen where the engine is."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / PUSHED / ROWS_FILE
        self._starts = array("q", [0])
        """Of the rows that were passed, and of the one after them."""

    def responses(self, row: int) -> tuple[RecordedSample, ...]:
        """The samples of a group that was taken."""
        with self._path.open("rb") as file:
            at = self._starts[min(row, len(self._starts) - 1)]
            file.seek(at)
            for _ in range(len(self._starts) - 1, row):
                at += len(file.readline())
                self._starts.append(at)
            return msgspec.json.decode(file.readline(), type=PushedRow).samples
