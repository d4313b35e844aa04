"""What the Scorer is told when it is built."""

from __future__ import annotations

from typing import Final

from penstock.messages.base import Value
from penstock.messages.samples import Purpose

GRACE_S: Final = 60.0


class ScorerSettings(Value, frozen=True, kw_only=True):
    """Deadlines and retries of reward functions, and of teachers."""

    timeout_s: float
    num_retries: int
    workers: tuple[int, ...] = (1,)
    """Of each reward function, how many calls it takes at once: that of one sample is a call of each."""
    grace_s: float = GRACE_S
    """Past the deadline of a call, until the backend is taken to have lost it."""
    whole_groups: tuple[Purpose, ...] = ()
    """Samples drawn for these are scored with their whole group, when all of it has ended."""
    constant_groups: int = 0
    """See ``reward.alarms``; 0: no such alarm."""
    failed_share: float = 1.0
    failed_window: int = 0
    """0: no such alarm."""
    fruitless_calls: int = 0
    """When so many calls have failed and none has given a reward, no further one is tried again, so that a run in which
    all of them fail comes to its end soon; 0: every one is."""
    teachers: tuple[str, ...] = ()
    """Names of all teachers; empty: samples go on with their reward alone."""
    teacher_timeout_s: float = 300.0
    """A teacher that has been asked and answers nothing at all for so long is replaced."""
    teacher_start_timeout_s: float = 300.0
    """A teacher that is there and not ready after so long is replaced."""
    max_teacher_losses: int = 5
    """A sample with which more teachers than this have died is given up."""
