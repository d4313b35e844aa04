"""From batches of Arrow to rows. Nobody trusts the files that they come from: a batch that is mapped into memory says
by itself where its texts lie, and a wrong word would be followed to anywhere."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from penstock.backends.data.problems import DataError

if TYPE_CHECKING:
    from pathlib import Path


def checked_batch(batch: Any, path: Path) -> Any:  # noqa: ANN401 - of pyarrow, which has no types
    """The batch, every offset and text of which has been looked at.

    Raises:
        DataError: one is wrong.
    """
    try:
        batch.validate(full=True)
    except ValueError as error:  # pyarrow's own is one
        raise DataError(f"{path}: its data are damaged: {error}") from error
    return batch


def rows_in(batch: Any, path: Path) -> list[dict[str, object]]:  # noqa: ANN401 - a batch or a table
    """Rows as Python has them.

    Raises:
        DataError: a text is no UTF-8, or a date beyond Python's.
    """
    try:
        return cast("list[dict[str, object]]", batch.to_pylist())
    except (ValueError, ArithmeticError) as error:
        raise DataError(f"{path}: a value cannot be read: {error}") from error
