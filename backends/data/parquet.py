"""Rows from a Parquet file."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow, missing_column

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
            for column in columns:
                if column not in names:
                    advice = "The scenario names it under data.prompt_key, data.label_key or data.metadata_keys"
                    raise DataError(f"{path}: {missing_column(column, names, advice).message}")
            number = 0
            wanted = list(dict.fromkeys((*columns, *(name for name in optional if name in names))))
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for row in cast("list[dict[str, object]]", batch.to_pylist()):
                    yield RawRow(f"{path}: row {number}", row)
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
