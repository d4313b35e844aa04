"""What an EngineWorker is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class EngineWorkerSettings(Value, frozen=True, kw_only=True):
    """Of one incarnation."""

    name: str
    epoch: int
    check_canary: bool = True
    canary_tolerance: float = 0.05
    """Largest mean absolute difference to the learner's log-probs, in nats."""
