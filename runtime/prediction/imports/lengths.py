"""The log-normal distribution of lengths behind a mean, a longest response, and the share that was cut off."""

from __future__ import annotations

import math
import statistics
from typing import Final, NamedTuple

_NORMAL: Final = statistics.NormalDist()
CUT: Final = 0.002
"""Share of the responses, from which on the longest was cut off rather than drawn."""
_EULER: Final = 0.5615
"""e^−γ: the longest of N responses is, as a mean, about the quantile 1 − e^−γ/N (extreme values of Gumbel's type)."""


class LogNormal(NamedTuple):
    """Lengths in tokens, before anything is cut off."""

    median: float
    sigma: float


def log_normal_of(mean: float, longest: float, num_samples: float, truncated: float) -> LogNormal:
    """Fit two facts with two parameters.

    Args:
        mean: of the lengths, after what is too long was cut off.
        longest: of ``num_samples`` responses, as a mean.
        num_samples: of a batch.
        truncated: share that was cut off at ``longest``.
    """
    is_cut = truncated > CUT
    share = min(0.999, truncated) if is_cut else _EULER / max(1.0, num_samples)
    quantile = _NORMAL.inv_cdf(1.0 - min(0.95, share))
    low, high = 0.0, max(2.0, quantile)
    if longest <= mean * (1 + 1e-9):
        return LogNormal(mean, 0.0)
    for _ in range(60):  # the mean falls with sigma, as the upper quantile stays where it is
        sigma = (low + high) / 2
        middle = math.log(longest) - sigma * quantile
        if mean_of_cut(math.exp(middle), sigma, longest if is_cut else math.inf) > mean:
            low = sigma
        else:
            high = sigma
    return LogNormal(math.exp(math.log(longest) - high * quantile), high)


def mean_of_cut(median: float, sigma: float, cut: float) -> float:
    """Of ``min(X, cut)`` with a log-normal X."""
    whole = median * math.exp(sigma * sigma / 2)
    if math.isinf(cut) or not sigma:
        return min(whole, cut)
    at = math.log(cut / median) / sigma
    return whole * _NORMAL.cdf(at - sigma) + cut * (1 - _NORMAL.cdf(at))
