"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, assert_never

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions

Schedule = Literal["constant", "linear", "cosine"]

FINAL_FRACTION: Final = 0.1
"""Where ``linear`` and ``cosine`` end, relative to the peak, where nothing else is said."""
CRITIC_FACTOR: Final = 10.0
"""Of the critic's learning rate over the policy's, where nothing is said."""


def policy_learning_rate(step: int, options: LearnerOptions, *, num_steps: int) -> float:
    """Of the batch that ``step`` others precede, in a run of ``num_steps``."""
    return learning_rate(
        step,
        peak=options.learning_rate,
        warmup_steps=options.warmup_steps,
        num_steps=num_steps,
        schedule=options.lr_schedule,
        final_fraction=options.min_learning_rate_ratio,
    )


def critic_learning_rate(step: int, options: LearnerOptions, *, num_steps: int) -> float:
    """Likewise, of the critic."""
    return learning_rate(
        step,
        peak=options.objective.critic_learning_rate or CRITIC_FACTOR * options.learning_rate,
        warmup_steps=options.objective.critic_warmup_steps,
        num_steps=num_steps,
        schedule=options.lr_schedule,
        final_fraction=options.min_learning_rate_ratio,
    )


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    num_steps: int,
    schedule: Schedule,
    final_fraction: float = FINAL_FRACTION,
) -> float:
    """The learning rate of ``step`` (counted from 0).

    It rises in equal steps to ``peak``, which the step ``warmup_steps`` has, and then follows ``schedule`` so that
    step ``num_steps − 1`` has ``final_fraction`` of it. Past ``num_steps`` it stays there.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
    match schedule:
        case "constant":
            fraction = 1.0
        case "linear":
            fraction = 1.0 - (1.0 - final_fraction) * done
        case "cosine":
            fraction = final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(schedule)
    return peak * fraction


def is_reference_due(version: int, options: LearnerOptions) -> bool:
    """Whether the reference becomes the policy of this version."""
    every = options.objective.reference_every
    return every is not None and version % every == 0
