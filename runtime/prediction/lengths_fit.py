"""What recorded lengths say: quantiles, how alike they are within a group, and whether they drift."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.recorded import SampleSeen

NUM_QUANTILES: Final = 101
_NORMAL: Final = statistics.NormalDist()


def quantiles_of(lengths: Sequence[int]) -> tuple[float, ...]:
    """Evenly spaced, the first of share 0 and the last of share 1."""
    shares = np.linspace(0.0, 1.0, NUM_QUANTILES)
    return tuple(round(float(value), 1) for value in np.quantile(np.array(lengths, dtype=np.float64), shares))


def correlation_of(samples: Sequence[SampleSeen]) -> float | None:
    """Intraclass correlation of the lengths' normal scores within groups, in [0, 1]; None where no group has two
    samples, or all lengths are equal."""
    lengths = np.array([sample.num_tokens for sample in samples], dtype=np.float64)
    if len(lengths) < 2 or lengths.min() == lengths.max():
        return None
    # Of equal lengths each has the mean rank: what is compared are places among all, as the simulation draws them.
    _, place, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / len(lengths)
    scores = np.array([_NORMAL.inv_cdf(float(share)) for share in middle])[place]
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for sample, score in zip(samples, scores, strict=True):
        groups[sample.group_id].append(float(score))
    within = [statistics.variance(group) for group in groups.values() if len(group) > 1]
    if not within:
        return None
    total = float(scores.var())
    return min(1.0, max(0.0, 1.0 - statistics.fmean(within) / total))


def drift_of(samples: Sequence[SampleSeen]) -> float | None:
    """(Mean length of the second half of the steps − of the first) ÷ mean; None where there are no two halves."""
    trained = [sample for sample in samples if sample.version is not None]
    if not trained:
        return None
    middle = statistics.median(sample.version or 0 for sample in trained)
    early = [sample.num_tokens for sample in trained if (sample.version or 0) <= middle]
    late = [sample.num_tokens for sample in trained if (sample.version or 0) > middle]
    if not early or not late:
        return None
    return (statistics.fmean(late) - statistics.fmean(early)) / statistics.fmean(early + late)
