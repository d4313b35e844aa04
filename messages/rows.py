"""The sources of a run's rows, as those see them who only count rows, and which rows are drawn again."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.messages.base import Options, Value


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


class ReplayOptions(Options, frozen=True, kw_only=True):
    """Prompts that earned little are drawn again."""

    fraction: Annotated[float, Meta(gt=0, le=1)]
    """Share of the groups that are drawn from such prompts, as long as there are any."""
    below_reward: float
    """A prompt earned little when the mean reward of its last group, also of one that was turned away, is below."""
    max_times: Annotated[int, Meta(ge=1)] = 3
    """So often in a row at most; afterwards it comes again when the dataset does."""
    min_gap: Annotated[int, Meta(ge=0)] = 0
    """Groups that must have come in since its last one."""
