"""Why the tokens of a batch weigh unequally; without PyTorch, for who only reads figures.

The effective sample size is a matter of squares: of 5,000 tokens that are as likely as when they were drawn, a single
one that became 70 times likelier halves it, and holds little more than a hundredth of their weight. So two figures
beside it say whether the policy has moved, or a few tokens are out of the common, and whether these count at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

ESS: Final = "train/ess_ratio"
LOG_RATIO: Final = "train/log_ratio_abs"
HEAVY_WEIGHT: Final = "train/heavy_weight"
HEAVY: Final = 10.0
"""Ratio of the learner's probability to the engine's, above which a token is heavy."""
SMALLEST_ESS: Final = 0.5
"""Share of its tokens that a batch is worth, below which the rest is looked at."""
FAR_NATS: Final = 0.3
"""Of a token in the mean. Normally distributed log-ratios of this mean distance leave 87 % of the sample size."""
HEAVY_SHARE: Final = 0.1
"""Of the weight, which decides a step."""

Reason = Literal["far", "few"]


def unequal(figure: Callable[[str], float | None]) -> Reason | None:
    """Why a few tokens decide the step: the policy is ``far`` from what drew them, or only a ``few`` of them are; None
    where none do.

    Args:
        figure: gives one of a batch, or of several the mean, by its name; None where there is none. Of runs that do not
            say how far they are, it is as if they were far.
    """
    ess, log_ratio, heavy = figure(ESS), figure(LOG_RATIO), figure(HEAVY_WEIGHT)
    if ess is None or ess >= SMALLEST_ESS:
        return None
    if log_ratio is None or heavy is None or log_ratio >= FAR_NATS:
        return "far"
    return "few" if heavy >= HEAVY_SHARE else None
