"""What an EngineWorker is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class EngineWorkerSettings(Value, frozen=True, kw_only=True):
    """Of one incarnation."""

    name: str
    epoch: int
    retracts: bool = False
    """Under ``interrupt`` the engine itself holds what runs and computes it again under the new weights; it need not
    be ended first."""
    takes_turns: bool = False
    """It shares its devices with the learner."""
    is_lent: bool = False
    """It is lent them only: when the learner wants them, it hands back what it has, and counts as one that is not
    there until its next turn."""
    check_canary: bool = True
    canary_tolerance: float = 0.05
    """Largest mean absolute difference to the learner's log-probs, in nats."""


class TeacherSettings(Value, frozen=True, kw_only=True):
    """Of one incarnation of a teacher."""

    name: str
    epoch: int
