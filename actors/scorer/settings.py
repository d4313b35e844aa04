"""What the Scorer is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class ScorerSettings(Value, frozen=True, kw_only=True):
    """Deadlines and retries of reward functions, and of teachers."""

    timeout_s: float
    num_retries: int
    grace_s: float = 60.0
    """Past the deadline of a call, until the backend is taken to have lost it."""
    teachers: tuple[str, ...] = ()
    """Names of all teachers; empty: samples go on with their reward alone."""
    teacher_timeout_s: float = 300.0
    """A teacher that has been asked and answers nothing at all for so long is replaced."""
    teacher_start_timeout_s: float = 300.0
    """A teacher that is there and not ready after so long is replaced."""
    max_teacher_losses: int = 5
    """A sample with which more teachers than this have died is given up."""
