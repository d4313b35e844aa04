"""What a run asks of its rows, whether they are in memory or read when they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from penstock.messages.rows import RowSource
    from penstock.messages.samples import Prompt


class Rows(Protocol):
    """Prompts by row number."""

    @property
    def num_rows(self) -> int:
        """Rows that can be used."""
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """Why rows were skipped → how many."""
        ...

    @property
    def sources(self) -> tuple[RowSource, ...]:
        """In the order of their rows."""
        ...

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Of each prompt, for :mod:`.duplicates`."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt."""
        ...

    @property
    def digest(self) -> str:
        """Of what the rows are made of, where they are not in memory; empty where they are."""
        ...

    def prompt(self, row: int, epoch: int) -> Prompt:
        """The prompt of a row, for the given time through the dataset.

        Raises:
            IndexError: there is no such row.
        """
        ...

    def place_of(self, row: int) -> str:
        """File and line of a row."""
        ...


def num_skipped(rows: Rows) -> int:
    """Rows that could not be used."""
    return sum(rows.skipped.values())
