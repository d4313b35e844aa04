"""The sources of a run's rows, as those see them who only count rows."""

from __future__ import annotations

from penstock.messages.base import Value


class RowSource(Value, frozen=True, kw_only=True):
    """One source. Its rows are numbered after those of the sources before it."""

    name: str
    num_rows: int
    share: int = 0
    """Of the prompts of each period of the mixture, which is as long as the shares of all sources together. 0, and then
    in all sources: they are gone through as if they were one."""
    block_rows: int = 0
    """Rows that are read together when one of them is; the shuffle goes through the dataset by blocks of so many.
    0: each row is read by itself."""
