"""Rows from a Parquet file."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from penstock.backends.data.arrow_rows import rows_in
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow, wanted_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BATCH_ROWS: Final = 1024


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
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for row in rows_in(batch, path):
                    yield RawRow(f"{path}: row {number}", row)
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
