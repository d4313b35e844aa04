"""What the Scorer is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class ScorerSettings(Value, frozen=True, kw_only=True):
    """Deadlines and retries of reward functions."""

    timeout_s: float
    num_retries: int
    grace_s: float = 60.0
    """Past the deadline of a call, until the backend is taken to have lost it."""
