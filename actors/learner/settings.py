"""What the Learner is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class LearnerSettings(Value, frozen=True, kw_only=True):
    """Of one incarnation."""

    epoch: int
    publish_every: int
    publishes: bool = True
    """Whether there are engines to publish to."""
    save_every: int
    """Batches between two checkpoints."""
    saves_first: bool = False
    """Write a checkpoint of version 0, because it took long to get there."""
    step_timeout_s: float
    shares_with: tuple[str, ...] = ()
    """Engines on the learner's devices: they take turns."""
    lend_after_s: float | None = None
    """They are lent them only, when the learner has waited so long for a batch; None: each turn ends with a publish."""
    yield_timeout_s: float = 3600.0
    """For these engines to end what runs, and sleep."""
    start_timeout_s: float = 1800.0
    """For loading the model and the warm start."""
