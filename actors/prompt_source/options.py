"""The ``prompt_source:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.option_keys import PriorityKey, RoutingKey
from penstock.messages.rows import ReplayOptions


class PromptSourceOptions(Options, frozen=True, kw_only=True):
    """Which engine gets a sample, retries and deadlines."""

    routing: RoutingKey = "prefix_affine"
    """``prefix_affine``: the samples of a group go to one engine, which computes their prompt once, and to others when
    it is full. ``least_loaded``: each goes to the engine with the smallest share of its slots taken. ``round_robin``:
    one engine after the other. ``consistent_hash``: a prompt goes to the same engine whenever it comes, as long as that
    has room. Or ``file.py:Class`` (docs/hooks.md)."""
    max_load: Annotated[float, Meta(ge=1, le=16)] = 1.5
    """Samples that an engine is given at most, relative to its slots. What is above 1 waits there, so that a slot that
    becomes free is taken at once; it is given only while so many samples wait behind it that no other engine can become
    idle meanwhile. All others wait for the slot that becomes free first (docs/measured.md)."""
    num_retries: Annotated[int, Meta(ge=0)] = 2
    """How often a sample whose generation failed is issued again before it counts as failed. Rows may say otherwise:
    ``data.num_retries_key``."""
    max_engine_losses: Annotated[int, Meta(ge=1)] = 5
    """A sample that was on so many engines when they died counts as failed: it may be what kills them."""
    lease_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """A sample that shows no progress for so long is looked for. One that runs and makes no token for as long again is
    given to another engine; an engine where nothing moves is replaced."""
    census_timeout_s: Annotated[float, Meta(gt=0)] = 2.0
    """An unanswered census is repeated after this time."""
    priority: PriorityKey | None = None
    """``file.py:function``: a curriculum. Is called with ``prompt`` and ``history`` of candidates; the prompt with the
    highest number comes next. null: the order of the (shuffled) dataset."""
    priority_candidates: Annotated[int, Meta(ge=1)] = 1024
    """Prompts that a group is chosen among: the whole dataset where it has no more, else drawn anew for each group."""
    priority_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """For one call with many candidates. Those that it has no number for when it ends count as 0."""
    replay: ReplayOptions | None = None
    """Prompts that earned little are drawn again; null: they are not."""

    @property
    def chooses_rows(self) -> bool:
        """Whether the row of a group does not follow from its place in the stream of prompts."""
        return self.priority is not None or self.replay is not None
