"""The ``prompt_source:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.messages.base import Options


class PromptSourceOptions(Options, frozen=True, kw_only=True):
    """Retries and deadlines of issued samples."""

    num_retries: Annotated[int, Meta(ge=0)] = 2
    """How often a sample whose generation failed is issued again before it counts as failed."""
    max_engine_losses: Annotated[int, Meta(ge=1)] = 5
    """A sample that was on so many engines when they died counts as failed: it may be what kills them."""
    lease_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """A sample that shows no progress for so long is looked for. One that runs and makes no token for as long again is
    given to another engine; an engine where nothing moves is replaced."""
    census_timeout_s: Annotated[float, Meta(gt=0)] = 2.0
    """An unanswered census is repeated after this time."""
