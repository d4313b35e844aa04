"""Where rows come from: ``rows.jsonl``, ``rows.parquet``, ``lines:N``, ``reasoning_gym:NAME:N``, each with ``@[a:b]``.

Invariants:

* Reading is one pass in the order of the file; every row, good or bad, counts for the slice, so skipping bad rows
  never moves the others.
* A place names what an editor jumps to: file and line, and column where there is one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.data.generated import lines_rows, reasoning_gym_rows
from penstock.backends.data.jsonl import jsonl_rows
from penstock.backends.data.parquet import parquet_rows
from penstock.backends.data.problems import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.data.problems import RowProblem
    from penstock.backends.data.row import RawRow

JSONL_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES: Final = (".parquet", ".pq")
GENERATED: Final = ("lines", "reasoning_gym")

_SLICE: Final = re.compile(r"(?P<path>.*)@\[(?P<start>\d*):(?P<stop>\d*)\]", re.DOTALL)


class SourceSpec(NamedTuple):
    """A parsed ``path``."""

    path: str
    start: int
    stop: int | None

    def __str__(self) -> str:
        if self.start == 0 and self.stop is None:
            return self.path
        return f"{self.path}@[{self.start}:{'' if self.stop is None else self.stop}]"


def parse_source(path: str) -> SourceSpec:
    """Split the slice off.

    Raises:
        DataError: it ends like a slice and is none, or the slice is empty.
    """
    if match := _SLICE.fullmatch(path):
        start = int(match["start"] or 0)
        stop = int(match["stop"]) if match["stop"] else None
        if stop is not None and stop <= start:
            raise DataError(f"{path}: the slice [{start}:{stop}] is empty; its end must be above its start")
        return SourceSpec(match["path"], start, stop)
    if "@[" in path:
        raise DataError(f"{path}: expected a slice like @[0:1000], @[1000:] or @[:1000] (no negative numbers, no step)")
    return SourceSpec(path, 0, None)


def read_rows(
    spec: SourceSpec, columns: Sequence[str], *, seed: int, optional: Sequence[str] = ()
) -> Iterator[RawRow | RowProblem]:
    """The rows of the slice, in order.

    ``columns`` are those that will be asked for, and ``optional`` those that may be if they are there; others may be
    left out. ``seed`` is for generated rows.

    Raises:
        DataError: the source as a whole cannot be read, or the slice begins past its end.
    """
    num_read = 0
    for row in _open(spec.path, columns, optional, seed):
        if spec.stop is not None and num_read >= spec.stop:
            return
        if num_read >= spec.start:
            yield row
        num_read += 1
    if spec.start and num_read <= spec.start:
        raise DataError(f"{spec} selects no row: there are {num_read}")


def _open(path: str, columns: Sequence[str], optional: Sequence[str], seed: int) -> Iterator[RawRow | RowProblem]:
    kind, _, rest = path.partition(":")
    if kind == "lines" and rest:
        return lines_rows(path, rest, seed)
    if kind == "reasoning_gym" and rest:
        return reasoning_gym_rows(path, rest, seed)
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(_not_there(path, file))
    suffix = file.suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return jsonl_rows(file)
    if suffix in PARQUET_SUFFIXES:
        return parquet_rows(file, columns, optional)
    raise DataError(
        f"{file}: cannot tell what kind of file this is from {suffix or 'a name without ending'!r}; expected "
        f"{', '.join(JSONL_SUFFIXES)} (one JSON object a line) or {', '.join(PARQUET_SUFFIXES)}"
    )


def _not_there(path: str, file: Path) -> str:
    if file.is_dir():
        inside = _files_in(file)
        return f"{file} is a folder; name one file in it" + (f" ({inside})" if inside else "")
    found = f"there is no file {path}" + ("" if file.is_absolute() else f" (looked in {Path.cwd()})")
    if not file.parent.is_dir():
        return f"{found}; the folder {file.parent} does not exist either"
    inside = _files_in(file.parent)
    return found + (f"; data files beside it: {inside}" if inside else "; no data file is beside it either")


def _files_in(folder: Path) -> str:
    suffixes = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES)
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
