"""What every learner reports about a batch, whatever trains it. Names are those of the field."""

from __future__ import annotations

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


def as_metrics(figures: Mapping[str, float]) -> tuple[Metric, ...]:
    """Figures as they travel, by name."""
    return tuple(Metric(name=name, value=value) for name, value in sorted(figures.items()))
