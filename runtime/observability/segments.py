"""Files of lines that are closed piece by piece: ``NAME.jsonl``, which grows, and its segments before that.

Invariants:

* The lines of ``NAME.jsonl`` are those of its segments ``NAME.000001.jsonl``, ``NAME.000002.jsonl`` and so on, each
  plain or as ``.jsonl.gz``, and then of the file itself. A segment never changes but from plain to compressed, and ends
  with a line end, unless it is the last that a killed process wrote.
* Closing a segment is one rename. Compressed it is written beside, renamed, and then the plain one removed, so a kill
  between any two steps leaves every line where a reader finds it, once: where both are there they hold the same.
* Only the oldest segments are ever removed, and ``removed.json`` says so first (:mod:`.disk_budget`).
* A reader may read while all this goes on: it gets every line that was there when it began and was not removed.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Stream = BinaryIO | gzip.GzipFile
SUFFIX: Final = ".jsonl"
COMPRESSED: Final = ".gz"
SEGMENT: Final = re.compile(r"(?P<name>.+)\.(?P<number>\d{6,})\.jsonl(\.gz)?")
_TAIL_BYTES: Final = 64 * 1024


class Line(NamedTuple):
    """A whole line, with its end."""

    file: Path
    number: int
    """In that file, from 1."""
    data: bytes


class SegmentFile:
    """Appends whole lines to a file, and closes a segment of it whenever it has become long enough. For one thread."""

    def __init__(self, path: Path, *, max_bytes: int = 0, anew: bool = False) -> None:
        """
        Args:
            path: the file; made with its folders when it is not there.
            max_bytes: a segment is closed with the write that reaches it; 0: none ever is.
            anew: empty a file that is there, instead of going on behind its last whole line.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        if not anew:
            _cut_torn_line(path)
        self._file = path.open("wb" if anew else "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        self._number = max(_numbers(path), default=0)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> None:
        """Hand whole lines to the operating system.

        Raises:
            OSError: they could not be written, for example because the disk is full.
        """
        write_all(self._file, data)
        self._size += len(data)
        if self._max_bytes and self._size >= self._max_bytes:
            self._rotate()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def _rotate(self) -> None:
        self._number += 1
        # It is gone where this process was taken for dead, and its file closed by whoever keeps the budget.
        with suppress(FileNotFoundError):
            self._path.rename(segment_path(self._path, self._number))
        closed, self._file = self._file, self._path.open("ab", buffering=0)
        closed.close()
        self._size = 0


def segment_path(path: Path, number: int) -> Path:
    """Of a segment that is not compressed."""
    return path.with_name(f"{path.stem}.{number:06d}{SUFFIX}")


def close_file(path: Path) -> None:
    """Make a segment of a file to which nobody writes any more."""
    with suppress(FileNotFoundError):
        path.rename(segment_path(path, max(_numbers(path), default=0) + 1))


def files_in(folder: Path) -> list[Path]:
    """The files of lines in a folder, by name; each once, however many segments it has, and also where it has nothing
    but segments."""
    return sorted({folder / f"{_name_of(each)}{SUFFIX}" for each in _listed(folder) if _name_of(each)})


def plain_segments(folder: Path) -> list[Path]:
    """Segments that are not compressed, the oldest of each file first."""
    names = (each for each in _listed(folder) if each.endswith(SUFFIX) and SEGMENT.fullmatch(each))
    return [folder / name for name in sorted(names)]


def whole_lines(path: Path) -> Iterator[Line]:
    """The lines of a file with all its segments, in order; a line without its end is passed over, as it may be torn.

    Raises:
        FileNotFoundError: there is neither the file nor a segment of it.
        UserFault: a compressed segment is damaged.
    """
    for _, file, stream in opened(path):
        try:
            with stream:
                for number, line in enumerate(stream, start=1):
                    if line.endswith(b"\n"):
                        yield Line(file, number, line)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserFault(f"{file}: damaged: {error}") from error


def opened(path: Path, after: int = 0) -> Iterator[tuple[int | None, Path, Stream]]:
    """Segments and file, each opened when it is its turn: a writer may close more of them meanwhile.

    Args:
        path: of the file.
        after: only segments of higher numbers.

    Returns:
        The segment's number, None for the file itself; its name; open, to be closed by the caller.

    Raises:
        FileNotFoundError: there is neither the file nor a segment of it.
    """
    done = after
    while True:
        for number in (each for each in _numbers(path) if each > done):
            done = number
            yield from _open_segment(path, number)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            if not done:
                raise
            file = None  # its writer was killed between two segments
        if not newer_segments(path, done):
            break
        if file is not None:
            file.close()
    if file is not None:
        yield None, path, file


def _open_segment(path: Path, number: int) -> list[tuple[int | None, Path, Stream]]:
    """The segment, plain or compressed; nothing where it was removed meanwhile."""
    plain = segment_path(path, number)
    with suppress(FileNotFoundError):
        return [(number, plain, plain.open("rb"))]
    packed = plain.with_name(plain.name + COMPRESSED)
    with suppress(FileNotFoundError):
        return [(number, packed, gzip.open(packed, "rb"))]
    return []


def newer_segments(path: Path, after: int) -> bool:
    """Whether a segment of a higher number was closed."""
    return max(_numbers(path), default=0) > after


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _name_of(file: str) -> str:
    """Of the file that this is, or is a segment of; empty for anything else."""
    segment = SEGMENT.fullmatch(file)
    return segment["name"] if segment is not None else file.removesuffix(SUFFIX) if file.endswith(SUFFIX) else ""


def _numbers(path: Path) -> list[int]:
    """Of the closed segments of a file, ascending."""
    found = (SEGMENT.fullmatch(each) for each in _listed(path.parent))
    return sorted({int(each["number"]) for each in found if each is not None and each["name"] == path.stem})


def _cut_torn_line(path: Path) -> None:
    """Remove what follows the last line end, so that the first new line does not grow onto it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def write_all(file: Any, data: bytes) -> None:  # noqa: ANN401 - an unbuffered binary file, which typing calls FileIO
    """Write every byte; an unbuffered file may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
