"""What the Filter is told when it is built."""

from __future__ import annotations

# msgspec reads the annotation:
from penstock.actors.filter.options import FilterOptions
from penstock.messages.base import Value


class FilterSettings(Value, frozen=True, kw_only=True):
    """What the scenario says, and what follows from its other blocks."""

    options: FilterOptions
    judge_timeout_s: float = 60.0
    tells_scorer: bool = False
    """A reward function scores whole groups: the Scorer hears which failed samples are not replaced, as it waits for no
    others, and after the loss of one what that one had passed on."""
    keeps_samples: bool = False
    """Samples are kept for people to read, whatever becomes of them."""
