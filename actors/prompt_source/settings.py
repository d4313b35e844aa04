"""What the PromptSource is told when it is built."""

from __future__ import annotations

from typing import Literal

from penstock.messages.base import Value

Routing = Literal["least_loaded", "prefix_affine"]


class PromptSourceSettings(Value, frozen=True, kw_only=True):
    """Sizes, budgets and deadlines of the run."""

    epoch: int
    """Of this incarnation; above 0 it takes a census before it issues anything."""
    seed: int
    num_rows: int
    shuffle: bool
    samples_per_group: int
    num_retries: int
    max_engine_losses: int
    lease_timeout_s: float
    census_timeout_s: float
    routing: Routing = "prefix_affine"
    max_load: float = 1.5
    """Samples that an engine is given, relative to its slots."""
    salvages_responses: bool = True
    """What a lost attempt had reported is the prefix of the next one. Not so where nobody can put the other side of a
    conversation back to where it ends."""
    recorded_engines: tuple[str, ...] = ()
    """Those that answer with the responses that rows hold, and generate nothing."""
