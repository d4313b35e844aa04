"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Final, Literal, assert_never

Schedule = Literal["constant", "linear", "cosine"]

FINAL_FRACTION: Final = 0.1
"""Where ``linear`` and ``cosine`` end, relative to the peak, where nothing else is said."""


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
