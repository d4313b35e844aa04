"""JSON lines: written in whole lines, read back with the place of whatever is wrong.

Invariants:

* A writer hands the operating system whole lines only. A process that is killed loses what it had not flushed, and at
  most tears the last line. A writer that goes on with such a file cuts the torn line off first.
* A reader passes over a last line that has no line end, because a kill may have torn it. Any other line that cannot
  be read is an error that names file and line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.runtime.observability.segments import SegmentFile, whole_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RowT = TypeVar("RowT")
LINES_PER_WRITE: Final = 256

_encoder: Final = msgspec.json.Encoder()


class JsonLinesWriter:
    """Appends objects to a file, one a line. Not for several threads at once."""

    def __init__(self, path: Path, *, lines_per_write: int = LINES_PER_WRITE, segment_bytes: int = 0) -> None:
        """
        Args:
            path: the file; made with its folders when it is not there, continued when it is.
            lines_per_write: how many lines are collected before they are written.
            segment_bytes: from what size on the file is closed and the next one begun; 0: never.
        """
        self.path = path
        self._file = SegmentFile(path, max_bytes=segment_bytes)
        self._lines_per_write = lines_per_write
        self._rows: list[Any] = []

    def append(self, row: Any) -> None:  # noqa: ANN401 - whatever msgspec encodes
        """Add one row: a struct, or anything else that msgspec encodes. It must not change afterwards."""
        self._rows.append(row)
        if len(self._rows) >= self._lines_per_write:
            self.flush()

    def flush(self) -> None:
        """Hand what was collected to the operating system.

        Raises:
            OSError: it could not be written, for example because the disk is full.
        """
        if self._rows:
            rows, self._rows = self._rows, []
            self._file.write(_encoder.encode_lines(rows))

    def close(self) -> None:
        """Flush and close; a second time does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def read_rows(path: Path, row_type: type[RowT], *, is_row: Callable[[bytes], bool] | None = None) -> Iterator[RowT]:
    """The rows of a file with all its segments, in order.

    Args:
        path: the file.
        row_type: what a line holds.
        is_row: of a file with lines of several kinds: which of them are meant.

    Raises:
        FileNotFoundError: there is no such file.
        UserFault: a line before a torn last one is no such row.
    """
    decoder = msgspec.json.Decoder(row_type)
    for line in whole_lines(path):
        if is_row is not None and not is_row(line.data):
            continue
        try:
            yield decoder.decode(line.data)
        except UNREADABLE as error:
            raise UserFault(f"{line.file}, line {line.number}: {error}") from error
