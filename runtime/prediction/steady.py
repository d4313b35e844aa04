"""What the steady part of a run came to, measured alike on recorded and on simulated runs.

Steady are the steps after the first fifth, while engines fill up, and before the last η + 1, for which nothing more is
granted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity
from penstock.runtime.observability.shares import LABELS, Shares
from penstock.runtime.observability.summary import trained_tokens
from penstock.runtime.observability.training_time import newest_drive
from penstock.runtime.prediction.depths import Depths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.messages.training import Balance
    from penstock.runtime.observability.trackers import ActivityRow, StepRow

WORKING: Final = LABELS[Activity.WORKING]


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The steady part of one run."""

    num_steps: int
    step_s: float
    tokens_per_s: float
    """Of samples that were trained."""
    engines: dict[str, float]
    """Share of the time of all engines together by state; they add up to 1."""
    learner: dict[str, float]
    """Likewise."""
    occupancy: float
    """Mean share of the slots in use while engines worked."""
    goodput: float
    """Tokens trained ÷ tokens that left the system, by whatever end."""
    ages: tuple[float, ...]
    """Share of the trained samples by age in versions."""
    longest_tokens: float
    """Of a batch: its longest response, as a mean over the batches."""
    depths: Depths | None = None
    """Of the queues; None of recorded runs, which do not say."""

    @property
    def engines_busy(self) -> float:
        return self.engines[WORKING]

    @property
    def learner_busy(self) -> float:
        return self.learner[WORKING]


class StepSeen(NamedTuple):
    """A step as it was reported."""

    at_s: float
    staleness_counts: tuple[int, ...]
    response_lengths: tuple[int, ...]
    balance: Balance


class Lanes(NamedTuple):
    """Seconds by state, and those of working weighted by occupancy, up to a moment."""

    engines: dict[Activity, float]
    occupied_s: float
    learner: dict[Activity, float]


def stretch_of(num_steps: int, max_staleness: int) -> tuple[int, int] | None:
    """Indices of the step that begins the steady part and of its last one; None where fewer than three lie between."""
    first, last = num_steps // 5, num_steps - 2 - max_staleness
    return (first, last) if last - first >= 3 else None


def fewest_steps(max_staleness: int) -> int:
    """Of a run that has a steady part."""
    return next(count for count in itertools.count(max_staleness) if stretch_of(count, max_staleness) is not None)


def steady_of(steps: Sequence[StepSeen], before: Lanes, after: Lanes, depths: Depths | None = None) -> Steady:
    """Of the steps from the first, which only begins it, to the last; ``before`` and ``after`` are at these two."""
    first, last = steps[0], steps[-1]
    counted = steps[1:]
    length_s = last.at_s - first.at_s
    ages = Counter[int]()
    for step in counted:
        ages.update(dict(enumerate(step.staleness_counts)))
    worked_s = after.engines[Activity.WORKING] - before.engines[Activity.WORKING]
    trained = trained_tokens(last.balance) - trained_tokens(first.balance)
    left = sum(_ended(last.balance)) - sum(_ended(first.balance))
    return Steady(
        num_steps=len(counted),
        step_s=length_s / len(counted),
        tokens_per_s=sum(sum(step.response_lengths) for step in counted) / length_s,
        engines=_shares(before.engines, after.engines),
        learner=_shares(before.learner, after.learner),
        occupancy=(after.occupied_s - before.occupied_s) / worked_s if worked_s > 0 else 0.0,
        goodput=trained / left if left else 1.0,
        ages=tuple(ages[age] / max(1, ages.total()) for age in range(max(ages, default=0) + 1)),
        longest_tokens=sum(max(step.response_lengths, default=0) for step in counted) / len(counted),
        depths=depths,
    )


def _ended(balance: Balance) -> list[int]:
    return [count.num_made_tokens for count in balance.ended]


def _shares(before: Mapping[Activity, float], after: Mapping[Activity, float]) -> dict[str, float]:
    spent = {LABELS[state]: after[state] - before[state] for state in LABELS}
    total = sum(spent.values())
    return {label: seconds / total if total > 0 else 0.0 for label, seconds in spent.items()}


def recorded_steady(
    steps: Sequence[StepRow], activity: Mapping[str, Sequence[ActivityRow]], *, max_staleness: int
) -> Steady | None:
    """Of a run's folder, of its newest drive that is long enough; None where it has too few steps."""
    steps = newest_drive(steps, fewest_steps(max_staleness))
    stretch = stretch_of(len(steps), max_staleness)
    if stretch is None:
        return None
    rows = steps[stretch[0] : stretch[1] + 1]
    seen = [StepSeen(row.at_s, row.staleness_counts, row.response_lengths, row.balance) for row in rows]
    return steady_of(seen, lanes_at(activity, seen[0].at_s), lanes_at(activity, seen[-1].at_s))


def lanes_at(activity: Mapping[str, Sequence[ActivityRow]], until_s: float) -> Lanes:
    """Time of engines and learner by state up to this time, from the lanes of a run's folder."""
    engines, learner = Shares(), Shares()
    for name, rows in activity.items():
        if is_engine(name) or name == LEARNER:
            cut = [msgspec.structs.replace(row, end_s=min(row.end_s, until_s)) for row in rows if row.start_s < until_s]
            (learner if name == LEARNER else engines).add(cut)
    return Lanes(engines.seconds, engines.occupied_s, learner.seconds)
