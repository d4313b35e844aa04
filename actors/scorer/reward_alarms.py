"""What is noticed about a reward function that teaches nothing: it never varies, or it often fails.

Invariants:

* Only samples drawn for training count, and only rewards and failures to have one: what a teacher fails with is no
  reward function's doing.
* The same is said once, and again when it has been well in between.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.base import Metric

if TYPE_CHECKING:
    from penstock.actors.scorer.settings import ScorerSettings
    from penstock.actors.settled import KnownSettled
    from penstock.messages.samples import SampleKey

SMALLEST_SPREAD: Final = 1e-9
"""Rewards that differ by less count as equal."""
CONSTANT: Final = "reward/constant_groups"
FAILED: Final = "reward/failed_share"
ALARM: Final = "reward/alarm"


class _Seen(msgspec.Struct):
    """The rewards of one group so far."""

    num: int
    lowest: float
    highest: float


class RewardAlarms:
    """Hears every reward and every failure."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._open: dict[int, _Seen] = {}
        """Groups of which rewards are still to come. Where samples failed or were given up none may, until they are
        settled."""
        self._num_constant = 0
        """Groups after one another without any spread."""
        self._sole_value: float | None = None
        """The reward of the last groups of one."""
        self._says_constant = False
        self._failures: deque[bool] = deque(maxlen=max(1, settings.failed_window))
        self._num_failed = 0
        self._says_failing = False

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Groups in a row without spread, the share of failures, and whether there is an alarm."""
        alarm = float(self._says_constant or self._says_failing)
        return (Metric(CONSTANT, float(self._num_constant)), Metric(FAILED, self._share), Metric(ALARM, alarm))

    @property
    def _share(self) -> float:
        return self._num_failed / len(self._failures) if self._failures else 0.0

    def scored(self, key: SampleKey, size: int, reward: float) -> list[str]:
        """A sample has its reward; sentences for people."""
        texts = self._note(is_failure=False)
        if not self._settings.constant_groups:
            return texts
        seen = self._open.get(key.group_id)
        if seen is None:
            seen = self._open[key.group_id] = _Seen(0, reward, reward)
        seen.num += 1
        if reward < seen.lowest:
            seen.lowest = reward
        elif reward > seen.highest:
            seen.highest = reward
        if seen.num >= size:
            del self._open[key.group_id]
            texts += self._closed(seen, size)
        return texts

    def forget(self, settled: KnownSettled) -> None:
        """No more rewards of these groups come. The first ones alone are looked at: groups are settled about in order,
        and what stands behind one that is not goes after it."""
        for group_id in list(takewhile(settled.__contains__, self._open)):
            del self._open[group_id]

    def failed(self) -> list[str]:
        """A sample has no reward; sentences for people."""
        return self._note(is_failure=True)

    def _closed(self, seen: _Seen, size: int) -> list[str]:
        varies = seen.highest - seen.lowest >= SMALLEST_SPREAD
        if size == 1:  # no spread within; compared with the ones before
            varies = self._sole_value is not None and abs(seen.lowest - self._sole_value) >= SMALLEST_SPREAD
            self._sole_value = seen.lowest
        if varies:
            self._num_constant, self._says_constant = 0, False
            return []
        self._num_constant += 1
        if self._says_constant or self._num_constant < self._settings.constant_groups:
            return []
        self._says_constant = True
        within = "the same in all of" if size == 1 else "equal within each of"
        return [
            f"rewards have been {within} the last {self._num_constant} groups (the last was {seen.lowest:g}), so there "
            "is nothing to learn from: the reward function finds no answer in any response, or the task is too hard "
            "or too easy for this model; look at some samples: penstock samples RUN (reward.alarms.constant_groups)"
        ]

    def _note(self, *, is_failure: bool) -> list[str]:
        window = self._settings.failed_window
        if not window:
            return []
        if len(self._failures) == window:
            self._num_failed -= self._failures[0]
        self._failures.append(is_failure)
        self._num_failed += is_failure
        limit, share = self._settings.failed_share, self._share
        if share < limit / 2:
            self._says_failing = False
        if share < limit or len(self._failures) < window or self._says_failing:
            return []
        self._says_failing = True
        return [
            f"{self._num_failed} of the last {window} samples got no reward; penstock samples RUN --failed shows them "
            "with the reason (reward.alarms.failed_share)"
        ]
