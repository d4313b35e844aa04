"""What every learner reports about a batch, whatever trains it. Names are those of the field."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from penstock.messages.base import Metric
from penstock.messages.samples import Truncated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.messages.samples import Group


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``rollout/…``: rewards, lengths in response tokens and share of truncated responses. Empty without samples."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    lengths = [sample.num_tokens for sample in samples]
    return {
        "rollout/raw_reward": statistics.fmean(sample.reward or 0.0 for sample in samples),
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/truncated_ratio": statistics.fmean(isinstance(sample.outcome, Truncated) for sample in samples),
    }


def pass_at_k(corrects: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Chance that at least one of ``k`` samples drawn from those of a prompt is correct, the mean over the prompts, for
    k of 1, 2, 4, … up to the samples of the smallest group; empty where that has one or none.

    ``1 − Π_{i=n−c+1}^{n} (1 − k / i)`` with c of n samples correct, without bias: Chen et al., arXiv 2107.03374.
    """
    smallest = min((len(group) for group in corrects), default=0)
    if smallest < 2:
        return {}
    powers = [2**power for power in range(smallest.bit_length())]
    return {k: statistics.fmean(_pass_at_k(len(group), sum(group), k) for group in corrects) for k in powers}


def _pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    wrong = num_samples - num_correct
    if wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / drawn for drawn in range(wrong + 1, num_samples + 1))


def as_metrics(figures: Mapping[str, float]) -> tuple[Metric, ...]:
    """Figures as they travel, by name."""
    return tuple(Metric(name=name, value=value) for name, value in sorted(figures.items()))
