"""Rows of one file by their place in it, without the rows before them.

| file | a place is | what is kept |
|---|---|---|
| JSON lines | byte offset and length of the line | nothing |
| Parquet | the row's number | the columns that are wanted, of a few row groups |
| folder of ``datasets`` | the row's number | where each batch begins; the batches are mapped, not read |
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import codecs
import os
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from penstock.backends.data.arrow_folder import arrow_files, is_arrow_folder
from penstock.backends.data.arrow_rows import checked_batch, rows_in
from penstock.backends.data.jsonl import parsed_line
from penstock.backends.data.parquet import group_batches, largest_column, packed_bytes_of
from penstock.backends.data.problems import DataError, RowProblem
from penstock.backends.data.row import RawRow, wanted_columns
from penstock.backends.data.sources import JSONL_SUFFIXES, PARQUET_SUFFIXES, not_there

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

JSONL_BLOCK_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 32
"""Of a row group in memory, where its file packs it into a few of them."""
UNPACKED: Final = 4
"""Times as large as in the file, which a row group may always be."""
KEPT_GROUPS: Final = 6
"""Row groups of Parquet that are kept: a shuffle by blocks has at most so many at hand."""


class Located(NamedTuple):
    """A row, good or bad, and where it is."""

    offset: int
    length: int
    """In bytes; 0 where the offset is a number of a row."""
    number: int
    """For people: of the line, from 1, or of the row, from 0."""
    row: RawRow | RowProblem


class RowFile(Protocol):
    """A file with rows that can be asked for one by one."""

    @property
    def block_rows(self) -> int:
        """Rows that are read together."""
        ...

    @property
    def files(self) -> list[Path]:
        """What it is made of on disk."""
        ...

    def scan(self) -> Iterator[tuple[float, Located]]:
        """All rows in order, each with the share of the file that lies before it."""
        ...

    def read(self, offset: int, length: int, number: int) -> RawRow | RowProblem:
        """One row."""
        ...

    def close(self) -> None:
        """Let the file go."""
        ...


def open_row_file(path: str, columns: Sequence[str], optional: Sequence[str] = ()) -> RowFile:
    """Open it.

    Raises:
        DataError: there is none, it is of a kind whose rows cannot be asked for one by one, or it lacks a column.
    """
    file = Path(path).expanduser()
    if is_arrow_folder(file):
        return _ArrowRows(file, columns, optional)
    if not file.is_file():
        raise DataError(not_there(path, file))
    suffix = file.suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return _JsonlRows(file)
    if suffix in PARQUET_SUFFIXES:
        return ParquetRows(file, columns, optional)
    raise DataError(
        f"{file}: rows cannot be read one by one from this kind of file; data.stream wants "
        f"{', '.join((*JSONL_SUFFIXES, *PARQUET_SUFFIXES))} or a folder of datasets"
    )


class _JsonlRows:
    """One JSON object a line."""

    block_rows = JSONL_BLOCK_ROWS

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files = [path]
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    def scan(self) -> Iterator[tuple[float, Located]]:
        size = max(1, os.fstat(self._descriptor).st_size)
        offset = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.removeprefix(codecs.BOM_UTF8).strip():
                        yield offset / size, Located(offset, len(line), number, self._parsed(line, number))
                    offset += len(line)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from error

    def read(self, offset: int, length: int, number: int) -> RawRow | RowProblem:
        try:
            line = os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from error
        return self._parsed(line, number)

    def close(self) -> None:
        os.close(self._descriptor)

    def _parsed(self, line: bytes, number: int) -> RawRow | RowProblem:
        return parsed_line(f"{self._path}:{number}", line, is_first=number == 1)


class ParquetRows:
    """A Parquet file, by row groups."""

    def __init__(self, path: Path, columns: Sequence[str], optional: Sequence[str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        self.files = [path]
        self._errors = (OSError, pa.ArrowException)
        try:
            self._file = pq.ParquetFile(path)
        except self._errors as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
        self._columns = wanted_columns(path, columns, optional, cast("list[str]", self._file.schema_arrow.names))
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = [0, *accumulate(counts)]
        self._groups = OrderedDict[int, Any]()
        self.block_rows = max(counts, default=1)

    def scan(self) -> Iterator[tuple[float, Located]]:
        number, total = 0, max(1, self._starts[-1])
        for group in range(len(self._starts) - 1):
            for batch in self._batches(group):
                for row in rows_in(batch, self._path):
                    yield number / total, Located(number, 0, number, RawRow(self._place(number), row))
                    number += 1

    def read(self, offset: int, length: int, number: int) -> RawRow | RowProblem:
        group = bisect_right(self._starts, offset) - 1
        table = self._groups.get(group)
        if table is None:
            table = self._groups[group] = self._read(group)
            if len(self._groups) > KEPT_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        (row,) = rows_in(table.slice(offset - self._starts[group], 1), self._path)
        return RawRow(self._place(number), row)

    @property
    def num_kept(self) -> int:
        """Row groups that are in memory."""
        return len(self._groups)

    def close(self) -> None:
        self._groups.clear()
        self._file.close()

    def _batches(self, group: int) -> Iterator[Any]:
        """Of a row group that will be asked for as a whole: one that memory has no room for is refused here."""
        size_bytes, packed_bytes = 0, packed_bytes_of(self._file, group, self._columns)
        try:
            for batch in group_batches(self._file, self._path, group, self._columns):
                size_bytes += batch.nbytes
                if size_bytes > max(GROUP_BYTES, UNPACKED * packed_bytes):
                    raise DataError(
                        f"{self._path}: row group {group}: column '{largest_column(batch)}' takes more than "
                        f"{size_bytes >> 20} MiB in memory, and {packed_bytes >> 20} MiB in the file; write it with "
                        "smaller row groups, or set data.stream=false"
                    )
                yield batch
        except self._errors as error:
            raise DataError(f"{self._path} cannot be read as Parquet: {error}") from error

    def _read(self, group: int) -> Any:  # noqa: ANN401 - a table of pyarrow, which has no types
        try:
            return self._file.read_row_group(group, columns=self._columns)
        except self._errors as error:
            raise DataError(f"{self._path} cannot be read as Parquet: {error}") from error

    def _place(self, number: int) -> str:
        return f"{self._path}: row {number}"


class _ArrowRows:
    """A folder of ``datasets``: streams of record batches, mapped into memory."""

    def __init__(self, folder: Path, columns: Sequence[str], optional: Sequence[str]) -> None:
        import pyarrow as pa

        self._folder = folder
        self._pa = pa
        self.files = arrow_files(folder)
        self._maps: list[Any] = []
        self._schemas: list[Any] = []
        self._batches: list[tuple[int, int]] = []
        """File and offset of each batch."""
        self._starts = [0]
        self._columns: list[str] = []
        for index, path in enumerate(self.files):
            try:
                self._locate(index, path, columns, optional)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{path} cannot be read as a stream of Arrow batches: {error}") from error
        self.block_rows = max((b - a for a, b in zip(self._starts, self._starts[1:], strict=False)), default=1)
        self._kept = OrderedDict[int, Any]()

    def scan(self) -> Iterator[tuple[float, Located]]:
        number, total = 0, max(1, self._starts[-1])
        for index in range(len(self._batches)):
            for row in rows_in(self._batch(index), self._folder):
                yield number / total, Located(number, 0, number, RawRow(self._place(number), row))
                number += 1

    def read(self, offset: int, length: int, number: int) -> RawRow | RowProblem:
        index = bisect_right(self._starts, offset) - 1
        batch = self._kept.get(index)
        if batch is None:
            batch = self._kept[index] = self._batch(index)
            if len(self._kept) > KEPT_GROUPS:
                self._kept.popitem(last=False)
        (row,) = rows_in(batch.slice(offset - self._starts[index], 1), self._folder)
        return RawRow(self._place(number), row)

    def close(self) -> None:
        self._kept.clear()
        for mapped in self._maps:
            mapped.close()

    def _locate(self, index: int, path: Path, columns: Sequence[str], optional: Sequence[str]) -> None:
        mapped = self._pa.memory_map(str(path))
        self._maps.append(mapped)
        schema = self._pa.ipc.read_schema(self._pa.ipc.read_message(mapped))
        self._schemas.append(schema)
        self._columns = wanted_columns(self._folder, columns, optional, cast("list[str]", schema.names))
        while True:
            offset = mapped.tell()
            try:
                message = self._pa.ipc.read_message(mapped)
            except EOFError:
                return
            batch = self._pa.ipc.read_record_batch(message, schema)
            self._batches.append((index, offset))
            self._starts.append(self._starts[-1] + batch.num_rows)

    def _batch(self, index: int) -> Any:  # noqa: ANN401 - a batch of pyarrow, which has no types
        file, offset = self._batches[index]
        mapped = self._maps[file]
        mapped.seek(offset)
        batch = self._pa.ipc.read_record_batch(self._pa.ipc.read_message(mapped), self._schemas[file])
        return checked_batch(batch.select(self._columns), self.files[file])

    def _place(self, number: int) -> str:
        return f"{self._folder}: row {number}"
