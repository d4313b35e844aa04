"""Where rows come from: ``rows.jsonl`` (also ``.gz`` and ``.zst``), ``rows.parquet``, a folder that Hugging Face
``datasets`` has saved, ``lines:N``, ``sums:N``, ``shapes:N``, ``reasoning_gym:NAME:N``, each with ``@[a:b]``.

Invariants:

* Reading is one pass in the order of the file; every row, good or bad, counts for the slice, so skipping bad rows
  never moves the others.
* A slice is Python's, without a step: a negative bound counts from the end, and costs as many rows in memory.
* A place names what an editor jumps to: file and line, and column where there is one.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import deque
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from penstock.backends.data.arrow_folder import arrow_folder_rows, is_arrow_folder
from penstock.backends.data.generated import lines_rows, reasoning_gym_rows, shapes_rows, sums_rows
from penstock.backends.data.jsonl import jsonl_rows
from penstock.backends.data.parquet import parquet_rows
from penstock.backends.data.problems import DataError
from penstock.messages.texts import unexpanded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.backends.data.problems import RowProblem
    from penstock.backends.data.row import RawRow

JSONL_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
COMPRESSED_SUFFIXES: Final = (".gz", ".zst")
PARQUET_SUFFIXES: Final = (".parquet", ".pq")
GENERATED: Final = ("lines", "sums", "shapes", "reasoning_gym")

RowT = TypeVar("RowT")

_SLICE: Final = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]", re.DOTALL)


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
        stop = None if match["stop"] is None else int(match["stop"])
        if stop is not None and (start < 0) == (stop < 0) and stop <= start:
            raise DataError(f"{path}: the slice [{start}:{stop}] is empty; its end must be above its start")
        return SourceSpec(match["path"], start, stop)
    if "@[" in path:
        raise DataError(
            f"{path}: expected a slice like @[0:1000], @[1000:], or @[-100:] and @[:-100], which count from the end "
            "(no step)"
        )
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
    num_found = 0
    counted = Counted(_open(spec.path, columns, optional, seed))
    for row in sliced(counted, spec.start, spec.stop):
        num_found += 1
        yield row
    check_selection(spec, num_found, counted.num_rows)


def check_selection(spec: SourceSpec, num_found: int, num_rows: int) -> None:
    """Raises ``DataError`` where a slice takes nothing of rows that are there."""
    if not num_found and (spec.start or spec.stop is not None) and (num_rows or spec.start):
        raise DataError(f"{spec} selects no row: there are {num_rows}")


class Counted(Generic[RowT]):
    """Rows that have been read, good or bad."""

    def __init__(self, rows: Iterable[RowT]) -> None:
        self._rows = rows
        self.num_rows = 0

    def __iter__(self) -> Iterator[RowT]:
        for row in self._rows:
            self.num_rows += 1
            yield row


def sliced(rows: Counted[RowT], start: int, stop: int | None) -> Iterator[RowT]:
    """Those from ``start`` up to ``stop``, as Python counts."""
    if start < 0:
        last = deque(rows, maxlen=-start)
        first = rows.num_rows - len(last)
        end = rows.num_rows if stop is None else stop if stop >= 0 else rows.num_rows + stop
        for number, row in enumerate(last, start=first):
            if number < end:
                yield row
        return
    if stop is None or stop >= 0:
        yield from islice(rows, start, stop)
        return
    late = deque[RowT]()
    for row in islice(rows, start, None):
        late.append(row)
        if len(late) > -stop:
            yield late.popleft()


def _open(path: str, columns: Sequence[str], optional: Sequence[str], seed: int) -> Iterator[RawRow | RowProblem]:
    kind, _, rest = path.partition(":")
    if kind == "lines" and rest:
        return lines_rows(path, rest, seed, columns, optional)
    if kind == "sums" and rest:
        return sums_rows(path, rest, seed)
    if kind == "shapes" and rest:
        return shapes_rows(path, rest, seed)
    if kind == "reasoning_gym" and rest:
        return reasoning_gym_rows(path, rest, seed)
    file = Path(path).expanduser()
    if is_arrow_folder(file):
        return arrow_folder_rows(file, columns, optional)
    if not file.is_file():
        raise DataError(not_there(path, file))
    suffix = _suffix(file)
    if suffix in JSONL_SUFFIXES:
        return jsonl_rows(file)
    if suffix in PARQUET_SUFFIXES:
        return parquet_rows(file, columns, optional)
    raise DataError(
        f"{file}: cannot tell what kind of file this is from {suffix or 'a name without ending'!r}; expected "
        f"{', '.join(JSONL_SUFFIXES)} (one JSON object a line; compressed: {' or '.join(COMPRESSED_SUFFIXES)} after "
        f"it) or {', '.join(PARQUET_SUFFIXES)}" + (_csv_advice(file) if suffix == ".csv" else "")
    )


def _csv_advice(file: Path) -> str:
    """Cells become texts as they stand: ``007`` is no number, and a line end within quotes none of the row."""
    reads = f'csv.DictReader(open({json.dumps(str(file), ensure_ascii=False)}, newline="", encoding="utf-8-sig"))'
    program = shlex.quote(f"import csv, json; [print(json.dumps(row)) for row in {reads}]")
    return f". Its rows as JSON: python -c {program} > {shlex.quote(str(file.with_suffix('.jsonl')))}"


def _suffix(file: Path) -> str:
    """What kind of rows the file has, whether it is compressed or not."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        # A compressed file of another kind is none that can be read.
        return suffixes[-2] if len(suffixes) > 1 and suffixes[-2] in JSONL_SUFFIXES else suffixes[-1]
    return suffixes[-1] if suffixes else ""


def not_there(path: str, file: Path) -> str:
    """Why there is no such file, and what there is."""
    if file.is_dir():
        inside = _files_in(file)
        return f"{file} is a folder; name one file in it" + (f" ({inside})" if inside else "")
    found = f"there is no file {path}" + ("" if file.is_absolute() else f" (looked in {Path.cwd()})")
    if not file.parent.is_dir():
        return f"{found}; the folder {file.parent} does not exist either{unexpanded(path)}"
    inside = _files_in(file.parent)
    return found + (f"; data files beside it: {inside}" if inside else "; no data file is beside it either")


def _files_in(folder: Path) -> str:
    suffixes = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES)
    names = sorted(path.name for path in folder.iterdir() if _suffix(path) in suffixes)
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
