"""The figures of a run as it goes on: totals over all incarnations, rewards, staleness, rates.

The terminal, ``/metrics`` and the summary all read them here, so that they cannot contradict each other.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.messages.names import role_of
from penstock.messages.training import Balance, FailuresCounted
from penstock.runtime.observability.summary import generated_tokens, trained_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.messages.training import ActorReported, StepReported
    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import StepRow

REWARD: Final = "rollout/raw_reward"
"""Mean reward of a batch, before any normalisation."""
REWARD_STD: Final = "rollout/raw_reward_std"
"""Standard deviation of the rewards of a batch."""
REWARD_COMPONENT: Final = "rollout/reward/"
"""Before the name of a component."""
STALENESS_BOUND: Final = "buffer/staleness_bound"
"""Oldest age that a token of this batch may have, by the policies under which its groups were granted."""
MAX_STALENESS: Final = "buffer/max_staleness"
"""Bound of the policy that new grants follow."""
GRANTS_PAUSED: Final = "buffer/grants_paused"
"""1 while an operator has new grants paused."""
LOSS: Final = "train/loss"
LOGPROB_DIFF: Final = "train/train_rollout_logprob_abs_diff"
"""Mean |learner − engine| log-prob over the trained tokens of a batch, in nats."""
GENERATED_TOKENS: Final = "engine/generated_tokens"
"""Running total of one incarnation of an engine."""
CPU_SECONDS: Final = "process/cpu_s"
"""CPU time of one incarnation's process so far, all its threads together."""
CORE_WAIT_SECONDS: Final = "process/core_wait_s"
"""Time in which its threads could have run and had no core, likewise."""
ANSWERS: Final = "evaluation/answers"
"""Of evaluations, as the Buffer's process counts them."""
RUNNING: Final = "engine/running"
"""Requests that an engine decodes now."""
COUNTED: Final = (
    *("prompt_source/", "weight_publisher/", "filter/hook_", "filter/samples_failed"),
    "engine/weights_passed_on_bytes",
)
"""Counters of these stand in ``metrics.jsonl`` as they were at each step."""
CURSORS: Final = "data/"
"""So do these: prompts that were taken from each source of a mixture, whichever incarnation took them."""
END_STEPS: Final = 10
RATE_WINDOW_S: Final = 30.0
NO_FAILURES: Final = FailuresCounted(counts=(), num_samples=0)
EMPTY_BALANCE: Final = Balance(issued=0, in_system=0, ended=(), generated_tokens=0)


class Rate:
    """How fast a total grows, over the last half minute."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, total: float) -> None:
        """The total has this value now."""
        self._points.append((now_s, total))
        while len(self._points) > 2 and self._points[1][0] <= now_s - self._window_s:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """Growth a second; None until there are two different moments."""
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class RunningTotal:
    """A counter that every incarnation of every actor counts from 0."""

    def __init__(self) -> None:
        self.total = 0.0
        self._of: dict[str, tuple[int, float]] = {}
        self._seen_s = math.nan
        self._per_s = 0.0

    def restore(self, total: float) -> None:
        """Go on from the total of earlier drives of the run."""
        self.total += total

    def report(self, actor: str, epoch: int, value: float, now_s: float = math.nan) -> None:
        """An incarnation counts so much; reports that come late or twice change nothing. Of one actor alone ``now_s``,
        when it came, says how quickly the total grows."""
        last_epoch, last = self._of.get(actor, (epoch, 0.0))
        if epoch < last_epoch:
            return
        if epoch > last_epoch:
            last = 0.0
        grown = max(0.0, value - last)
        self.total += grown
        self._of[actor] = (epoch, max(last, value))
        if now_s > self._seen_s:
            self._per_s = grown / (now_s - self._seen_s)
        self._seen_s = now_s

    def at(self, now_s: float) -> float:
        """The total at this moment, if it has grown since the last report as before it."""
        return self.total + self._per_s * max(0.0, now_s - self._seen_s) if self._per_s else self.total


def _by_role(totals: Mapping[str, RunningTotal], now_s: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, total in totals.items():
        role = role_of(name)
        found[role] = found.get(role, 0.0) + total.at(now_s)
    return {role: round(seconds, 4) for role, seconds in found.items()}


class RunFigures:
    """Adds up what actors and steps report."""

    def __init__(self, *, progress_tokens: int) -> None:
        """
        Args:
            progress_tokens: a running request reports its tokens after every so many (``engines.progress_tokens``).
        """
        self.rewards = array("d")
        """Of each step that has one, for its course. With the differences all that grows here: 16 bytes a step."""
        self.logprob_diffs = array("d")
        self.staleness_counts: list[int] = []
        """Trained samples by age, over the whole run."""
        self.staleness_bound = 0
        """The largest of any batch."""
        self.balance: Balance = EMPTY_BALANCE
        self.version = 0
        self.failures: FailuresCounted = NO_FAILURES
        """Why samples failed, over the whole run, as the Buffer last said."""
        self.lost_tokens = 0
        self.restarts: dict[str, int] = {}
        self._progress_tokens = progress_tokens
        self._reported = RunningTotal()
        self._reported_rate = Rate()
        self._trained_rate = Rate()
        self._running: dict[str, float] = {}
        self._cpu: dict[str, RunningTotal] = {}
        self._core_waits: dict[str, RunningTotal] = {}
        self._counted: dict[str, RunningTotal] = {}
        self._cursors: dict[str, float] = {}

    def restore(self, rows: Sequence[StepRow], summary: RunSummary | None) -> None:
        """Go on from earlier drives of the run.

        Args:
            rows: their steps, one a version, ascending.
            summary: of the last of them that could write one; what those after it did besides steps is not known.
        """
        for row in rows:
            self._count(row)
            self.balance = row.balance
        if summary is not None:
            if summary.balance.issued >= self.balance.issued:  # it may be of a drive before the last step
                self.balance = summary.balance
            self._reported.restore(summary.tokens_reported)
            self.lost_tokens = summary.tokens_lost_estimate
            self.failures = FailuresCounted(counts=summary.failures, num_samples=summary.num_failures)
            self.restarts = {restart.name: restart.count for restart in summary.restarts}
            for cost in summary.costs:
                self._cpu.setdefault(cost.name, RunningTotal()).restore(cost.cpu_s)
        for name, value in rows[-1].metrics.items() if rows else ():
            if name.startswith(COUNTED) and value is not None:
                self._counted.setdefault(name, RunningTotal()).restore(value)

    # --- what is reported -------------------------------------------------------------------------------------

    def actor(self, report: ActorReported, now_s: float) -> None:
        """An actor's report."""
        for metric in report.metrics:
            if metric.name == GENERATED_TOKENS:
                self._reported.report(report.name, report.epoch, metric.value)
                self._reported_rate.add(now_s, self._reported.total)
            elif metric.name == CPU_SECONDS:
                total = self._cpu.setdefault(report.name, RunningTotal())
                total.report(report.name, report.epoch, metric.value, now_s)
            elif metric.name == CORE_WAIT_SECONDS:
                total = self._core_waits.setdefault(report.name, RunningTotal())
                total.report(report.name, report.epoch, metric.value, now_s)
            elif metric.name == RUNNING:
                self._running[report.name] = metric.value
            elif metric.name.startswith(CURSORS) and metric.name.endswith("/prompts"):
                self._cursors[metric.name] = max(metric.value, self._cursors.get(metric.name, 0.0))
            elif metric.name.startswith(COUNTED):
                self._counted.setdefault(metric.name, RunningTotal()).report(report.name, report.epoch, metric.value)

    def step(self, report: StepReported, row: StepRow) -> None:
        """A recorded step. A version that was trained again after the learner was lost counts once."""
        self.balance = report.balance
        self._trained_rate.add(row.at_s, self.tokens_trained)
        if row.version > self.version:
            self._count(row)

    def _count(self, row: StepRow) -> None:
        self.version = row.version
        reward, diff = row.metrics.get(REWARD), row.metrics.get(LOGPROB_DIFF)
        if reward is not None and math.isfinite(reward):
            self.rewards.append(reward)
        if diff is not None and math.isfinite(diff):
            self.logprob_diffs.append(diff)
        self.staleness_bound = max(self.staleness_bound, int(row.metrics.get(STALENESS_BOUND) or 0))
        missing = len(row.staleness_counts) - len(self.staleness_counts)
        self.staleness_counts.extend([0] * missing)
        for age, count in enumerate(row.staleness_counts):
            self.staleness_counts[age] += count

    def lost(self, name: str) -> int:
        """An actor was given up and is replaced; returns the tokens that are lost with it, as an estimate: each
        request that ran on an engine is, on average, half way to its next report."""
        self.restarts[name] = self.restarts.get(name, 0) + 1
        num_lost = round(self._running.pop(name, 0.0) * self._progress_tokens / 2)
        self.lost_tokens += num_lost
        return num_lost

    def leaves(self, name: str) -> None:
        """An engine has left; it has handed back what it had."""
        self._running.pop(name, None)

    # --- what follows from it -----------------------------------------------------------------------------------

    @property
    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by actor, over all its incarnations, up to its last report."""
        return {name: total.total for name, total in self._cpu.items()}

    def cpu_by_role_s(self, now_s: float) -> dict[str, float]:
        """CPU seconds by role at this moment: those of the last reports, and as many a second since as before them."""
        return _by_role(self._cpu, now_s)

    def core_waits_by_role_s(self, now_s: float) -> dict[str, float]:
        """Likewise, seconds in which threads could have run and no core was free."""
        return _by_role(self._core_waits, now_s)

    @property
    def counted(self) -> dict[str, float]:
        """What PromptSource, WeightPublisher and the hook of the Filter count, and what engines passed on, over all of
        them and all their incarnations, and how far each source of prompts has been gone through, by the name of the
        metric."""
        return {name: total.total for name, total in self._counted.items()} | self._cursors

    @property
    def tokens_generated(self) -> int:
        """Of every response that has come to the Buffer, up to the last step."""
        return generated_tokens(self.balance)

    @property
    def tokens_reported(self) -> int:
        """As the engines count what they make: ahead of what has come, and behind by what killed ones had not
        reported. For the rate, and for people who wait for the first step."""
        return int(self._reported.total)

    @property
    def tokens_trained(self) -> int:
        return trained_tokens(self.balance)

    @property
    def generated_per_s(self) -> float | None:
        """As the engines count."""
        return self._reported_rate.per_s

    @property
    def trained_per_s(self) -> float | None:
        return self._trained_rate.per_s

    @property
    def first_reward(self) -> float | None:
        """Mean of the first ten steps."""
        return mean(self.rewards[:END_STEPS])

    @property
    def last_reward(self) -> float | None:
        """Mean of the last ten steps."""
        return mean(self.rewards[-END_STEPS:])

    @property
    def mean_staleness(self) -> float | None:
        num_samples = sum(self.staleness_counts)
        ages = sum(age * count for age, count in enumerate(self.staleness_counts))
        return ages / num_samples if num_samples else None

    @property
    def max_staleness(self) -> int:
        return max((age for age, count in enumerate(self.staleness_counts) if count), default=0)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None
