"""What recorded lengths say: quantiles, how alike they are within a group, and whether they drift."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.runtime.prediction.fitting import CERTAIN, MIN_COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.engines.options import LatencyOptions
    from penstock.runtime.prediction.recorded import SampleSeen

    Floats = NDArray[np.float64]

NUM_QUANTILES: Final = 401
DRIFT: Final = 0.1
"""Of the mean length between the halves of a run, from which on it is modelled."""
LEAST: Final = 0.05
"""Of a length to the mean, at either end of a line."""
_NORMAL: Final = statistics.NormalDist()


def quantiles_of(lengths: Sequence[int]) -> tuple[float, ...]:
    """Evenly spaced, the first of share 0 and the last of share 1. With few the longest would be too long, as they
    lie on a straight line from the last but one."""
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


class Drift(NamedTuple):
    """Lengths that change over training, on a straight line by the number of the group."""

    first: float
    """Of the first group's lengths to the mean of all."""
    last: float
    """Of those of the group ``num_groups``."""
    num_groups: int

    def without(self, sample: SampleSeen) -> SampleSeen:
        """As if it had been drawn in the middle of the runs; at least one token, if it has any."""
        share = min(1.0, max(0.0, sample.group_id / self.num_groups))
        factor = self.first + share * (self.last - self.first)
        return sample._replace(num_tokens=max(min(1, sample.num_tokens), round(sample.num_tokens / factor)))

    def modelled(self, lengths: LatencyOptions) -> LatencyOptions:
        """A model of the lengths in the middle of the runs, with this."""
        course = round(self.first, 3), round(self.last, 3)
        return replace(lengths, response_tokens_course=course, response_tokens_course_groups=self.num_groups)


def drift_of(group_ids: Floats, lengths: Floats) -> Drift | None:
    """The line through the lengths of groups; None where its halves differ by less than :data:`DRIFT`, or where it is
    not told apart from chance.

    Args:
        group_ids: float64 ``[N]``.
        lengths: float64 ``[N]``, the mean of each group.
    """
    if len(group_ids) < MIN_COUNT or group_ids.max() <= 0:
        return None
    from_middle = group_ids - group_ids.mean()
    spread = float((from_middle * from_middle).sum())
    mean = float(lengths.mean())
    if not spread or mean <= 0:
        return None
    slope = float((from_middle * lengths).sum()) / spread
    left = lengths - mean - slope * from_middle
    uncertain = math.sqrt(float((left * left).sum()) / (len(lengths) - 2) / spread)
    reach = float(group_ids.max() - group_ids.min())
    if abs(slope) * reach / 2 < DRIFT * mean or abs(slope) < CERTAIN * uncertain:
        return None
    ends = (mean + slope * (at - float(group_ids.mean())) for at in (0.0, float(group_ids.max())))
    first, last = (max(LEAST, end / mean) for end in ends)
    return Drift(first, last, round(float(group_ids.max())))


def drift_of_samples(samples: Sequence[SampleSeen]) -> Drift | None:
    """See :func:`drift_of`; of what was trained, as of the last groups of a run only short ones have come to their
    end."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.version is not None:
            groups[sample.group_id].append(sample.num_tokens)
    means = [statistics.fmean(lengths) for lengths in groups.values()]
    return drift_of(np.array([*groups], dtype=np.float64), np.array(means, dtype=np.float64))
