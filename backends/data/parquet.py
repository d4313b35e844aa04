"""Rows from a Parquet file.

Invariants:

* A value may stand once in a file and in every row. So rows are read in batches that stay small even where each of them
  has all that their columns take in the file, and a row group that is kept whole is no larger than memory allows for.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from penstock.backends.data.arrow_rows import rows_in
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow, wanted_columns
from penstock.messages.texts import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BATCH_ROWS: Final = 1024
FEW_ROWS: Final = 8
"""That are read together whatever they take: one at a time is twenty times as slow."""
BATCH_BYTES: Final = 1 << 28
"""Of a batch in memory that has more rows than these, and of one row."""


def parquet_rows(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[RawRow]:
    """The rows with only these columns, and those of ``optional`` that are there; rows are counted from 0.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = cast("list[str]", file.schema_arrow.names)
            wanted = wanted_columns(path, columns, optional, names)
            number = 0
            for group in range(file.num_row_groups):
                for batch in group_batches(file, path, group, wanted):
                    for row in rows_in(batch, path):
                        yield RawRow(f"{path}: row {number}", row)
                        number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def group_batches(file: Any, path: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:  # noqa: ANN401 - of pyarrow
    """The rows of a row group with these columns, in batches of at most :data:`BATCH_BYTES` or :data:`FEW_ROWS`.

    Raises:
        DataError: the rows of a batch have more than these bytes each.
    """
    packed_bytes = packed_bytes_of(file, group, columns)
    num_rows = min(BATCH_ROWS, max(FEW_ROWS, BATCH_BYTES // max(1, packed_bytes)))
    for batch in file.iter_batches(batch_size=num_rows, row_groups=[group], columns=columns):
        if batch.nbytes > BATCH_BYTES * batch.num_rows:
            raise DataError(
                f"{path}: row group {group}: column '{largest_column(batch)}' has more than {BATCH_BYTES >> 20} MiB in "
                f"each of {counted(batch.num_rows, 'row')}; no row is as long"
            )
        yield batch


def packed_bytes_of(file: Any, group: int, columns: Sequence[str]) -> int:  # noqa: ANN401
    """What these columns take in a row group, each value of a dictionary once."""
    found = file.metadata.row_group(group)
    parts = [found.column(index) for index in range(found.num_columns)]
    heads = tuple(f"{name}." for name in columns)  # a path ends within a column that is nested
    return sum(part.total_uncompressed_size for part in parts if f"{part.path_in_schema}.".startswith(heads))


def largest_column(batch: Any) -> str:  # noqa: ANN401
    """The one that takes most memory."""
    return str(max(batch.schema.names, key=lambda name: int(batch.column(name).nbytes)))
