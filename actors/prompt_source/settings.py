"""What the PromptSource is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


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
