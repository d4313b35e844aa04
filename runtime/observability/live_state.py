"""What the terminal view knows of the run."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity
from penstock.runtime.observability.figures import (
    ANSWERS,
    END_STEPS,
    GRANTS_PAUSED,
    MAX_STALENESS,
    RUNNING,
    RunFigures,
    mean,
)
from penstock.runtime.observability.shares import Shares
from penstock.runtime.observability.trackers import StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.training import ActorReported, StepReported
    from penstock.runtime.observability.summary import RunSummary

WARM_START: Final = "learner/warm_start_fraction"
REWARDS: Final = "reward/"
PAUSED_TEXT: Final = "new grants are paused by an operator until: penstock pause --off"
PACE_STEPS: Final = 20
"""The time left is judged by the pace of so many last steps."""


class ActorState:
    """The last that was heard of one actor."""

    def __init__(self) -> None:
        self.state = ""
        self.activity: Activity | None = None
        self.running: float | None = None
        self.shares = Shares()
        self.num_restarts = 0
        self.is_down = False


class LiveState:
    """The run as the view shows it."""

    def __init__(self, name: str, num_steps: int, *, now_s: float) -> None:
        self.name = name
        self.num_steps = num_steps
        self.began_s = now_s
        self.phase = ""
        self.actors: dict[str, ActorState] = {}
        self.figures = RunFigures(progress_tokens=0)
        self.recent_staleness: float | None = None
        """Mean age of the samples of the last step."""
        self.num_answers = 0
        self.total_answers = 0
        """That are wanted, of a run that only evaluates."""
        self.warm_start: float | None = None
        """Share of the warm start that is done."""
        self.rewards: dict[str, float] = {}
        """Figures of the reward functions, by what follows ``reward/``."""
        self.is_paused = False
        """An operator has new grants paused."""
        self.policy = ""
        """That new grants follow, with its bound; empty before the Buffer has said so."""
        self._step_times: deque[float] = deque(maxlen=PACE_STEPS)

    def restore(self, rows: Sequence[StepRow], summary: RunSummary | None) -> None:
        """Go on from earlier drives of the run; see ``RunFigures.restore``."""
        self.figures.restore(rows, summary)

    @property
    def has_stepped(self) -> bool:
        """Whether there was a step since the view began."""
        return bool(self._step_times)

    @property
    def version(self) -> int:
        """Batches trained."""
        return self.figures.version

    @property
    def max_staleness(self) -> int:
        return self.figures.max_staleness

    @property
    def recent_reward(self) -> float | None:
        """Mean of the last ten steps."""
        return mean(self.figures.rewards[-END_STEPS:])

    @property
    def left_s(self) -> float | None:
        """Time to the last step at the present pace; None before there is one."""
        times = self._step_times
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (self.num_steps - self.version) * (times[-1] - times[0]) / (len(times) - 1)

    @property
    def engines(self) -> dict[str, ActorState]:
        return {name: state for name, state in self.actors.items() if is_engine(name)}

    def actor(self, report: ActorReported, now_s: float) -> None:
        """An actor's report."""
        self.figures.actor(report, now_s)
        actor = self.actors.setdefault(report.name, ActorState())
        actor.is_down = False
        actor.state = report.state
        for metric in report.metrics:
            if metric.name == RUNNING and math.isfinite(metric.value):
                actor.running = metric.value
            elif metric.name == ANSWERS:
                self.num_answers = max(self.num_answers, int(metric.value))
            elif metric.name == GRANTS_PAUSED:
                self.is_paused = bool(metric.value)
            elif metric.name == WARM_START:
                self.warm_start = metric.value
            elif metric.name.startswith(REWARDS):
                self.rewards[metric.name.removeprefix(REWARDS)] = metric.value
        if report.activities:
            actor.shares.add(report.activities)
            actor.activity = report.activities[-1].activity

    @property
    def is_loading(self) -> bool:
        """Whether the learner has not said that it is ready, or an engine that it is up."""
        learner = self.actors.get(LEARNER)
        if learner is None or learner.activity in (None, Activity.STARTING):
            return True
        engines = self.engines.values()
        return bool(engines) and all(engine.activity in (None, Activity.STARTING) for engine in engines)

    def lost(self, name: str) -> None:
        """This actor was given up."""
        actor = self.actors.setdefault(name, ActorState())
        actor.is_down = True
        actor.num_restarts += 1
        actor.running = actor.activity = None

    def leaves(self, name: str) -> None:
        """This engine is not in the run any more."""
        self.actors.pop(name, None)

    def step(self, report: StepReported, now_s: float) -> None:
        """A recorded step."""
        is_new = report.version > self.version
        self.figures.step(report, StepRow.of(now_s, report))
        self.num_steps = report.num_steps
        bound = next((metric.value for metric in report.metrics if metric.name == MAX_STALENESS), None)
        self.policy = "" if bound is None else f"{report.policy}, at most {bound:.0f}"
        if is_new:
            self._step_times.append(now_s)
        num_samples = sum(report.staleness_counts)
        if num_samples:
            ages = sum(age * count for age, count in enumerate(report.staleness_counts))
            self.recent_staleness = ages / num_samples
