"""What the Filter is told when it is built."""

from __future__ import annotations

from typing import Literal

from penstock.messages.base import Value


class FilterSettings(Value, frozen=True, kw_only=True):
    """As ``filter:`` in the scenario; see :class:`penstock.actors.filter.options.FilterOptions`."""

    drop_zero_spread: bool
    min_response_tokens: int
    max_response_tokens: int | None
    has_function: bool
    on_failed_sample: Literal["refill", "shrink", "reject"]
    max_refills: int
    min_group_size: int
    judge_timeout_s: float = 60.0
    tells_scorer: bool = False
    """A reward function scores whole groups: the Scorer hears which failed samples are not replaced, as it waits for no
    others, and after the loss of one what that one had passed on."""
    has_sample_function: bool = False
    drop_samples: Literal["before_statistics", "after_statistics"] = "before_statistics"
    has_hook: bool = False
    keeps_samples: bool = False
    """Samples are kept for people to read, whatever becomes of them."""
    offers_rejected: bool = False
    """Groups that are turned away by a verdict on their contents travel whole, so that the Buffer may keep them."""
