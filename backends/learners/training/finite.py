"""What is said of an optimizer step whose loss or gradient is no number."""

from __future__ import annotations

import math

from penstock.messages.errors import DivergedError


def non_finite(*, loss: float, norm: float, name: str) -> DivergedError | None:
    """The error of a step that must not be made; None where it may.

    Args:
        loss: of the step.
        norm: of its gradient.
        name: of the step, for the message.
    """
    if math.isfinite(norm) and math.isfinite(loss):
        return None
    return DivergedError(
        f"{name}: the training has diverged: the loss is {loss} and the gradient norm {norm}, both must be finite; the "
        "weights were not changed. Lower learner.learning_rate or learner.max_grad_norm, or look at the rewards of "
        "this batch"
    )
