"""What the Learner is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class LearnerSettings(Value, frozen=True, kw_only=True):
    """Of one incarnation."""

    epoch: int
    publish_every: int
    save_every: int
    """Batches between two checkpoints."""
    saves_first: bool = False
    """Write a checkpoint of version 0, because it took long to get there."""
    step_timeout_s: float
    start_timeout_s: float = 1800.0
    """For loading the model and the warm start."""
