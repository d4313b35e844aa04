"""Rows from a folder that Hugging Face ``datasets`` has written with ``save_to_disk``, without that library.

Such a folder has ``state.json``, which names its Arrow files (streams of record batches) in their order. A dictionary
of datasets has ``dataset_dict.json`` and a folder for each split.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from penstock.backends.data.arrow_rows import checked_batch, rows_in
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow, wanted_columns
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STATE_FILE: Final = "state.json"
SPLITS_FILE: Final = "dataset_dict.json"

FormT = TypeVar("FormT", bound=msgspec.Struct)


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    indices_data_files: list[_DataFile] | None = msgspec.field(name="_indices_data_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


def is_arrow_folder(path: Path) -> bool:
    """Whether ``datasets`` has written it."""
    return (path / STATE_FILE).is_file() or (path / SPLITS_FILE).is_file()


def arrow_folder_rows(folder: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[RawRow]:
    """The rows with only these columns, and those of ``optional`` that are there; rows are counted from 0.

    Raises:
        DataError: the folder cannot be read, has several splits, or lacks a column.
    """
    import pyarrow as pa

    number = 0
    for path in arrow_files(folder):
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
                names = cast("list[str]", reader.schema.names)
                wanted = wanted_columns(folder, columns, optional, names)
                for batch in reader:
                    for row in rows_in(checked_batch(batch.select(wanted), path), path):
                        yield RawRow(f"{folder}: row {number}", row)
                        number += 1
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as a stream of Arrow batches: {error}") from error


def arrow_files(folder: Path) -> list[Path]:
    """The files of a folder that ``datasets`` has written, in their order.

    Raises:
        DataError: it has several splits, is a selection by indices, or names a file elsewhere.
    """
    if not (folder / STATE_FILE).is_file():
        splits = _read(folder / SPLITS_FILE, _Splits).splits
        raise DataError(f"{folder} has several splits; name one of them: {', '.join(f'{folder}/{s}' for s in splits)}")
    state = _read(folder / STATE_FILE, _State)
    if state.indices_data_files:
        raise DataError(
            f"{folder} was saved as a selection of another dataset, by indices; save it anew after "
            "`dataset.flatten_indices()`"
        )
    names = [file.filename for file in state.data_files]
    if elsewhere := [name for name in names if Path(name).name != name]:
        raise DataError(f"{folder / STATE_FILE}: names {elsewhere[0]!r}, which is no file of this folder; save it anew")
    return [folder / name for name in names]


def _read(path: Path, form: type[FormT]) -> FormT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, *UNREADABLE) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
