"""The Scorer: rewards in flight, their deadlines and retries. It never turns an error into a reward.

Invariants:

* Each sample that comes in goes out once: scored, or failed with the reason.
* Only a reward function gives a reward, or the episode itself: a sample that comes with one is passed on as it is, and
  so is one that is imitated, which needs none. A call that fails, hangs or returns nonsense is tried again, then the
  sample is passed on as ``ScoringFailed``.

State: the samples being scored. A sample leaves it with its ``SampleJudged``, or when its group is settled.

| waits for | who ends it |
|---|---|
| a reward | the backend, which ends each call at ``timeout_s``; when it answers nothing for longer, a sweep |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

import msgspec

from penstock.actors.waits import several
from penstock.messages.commands import Score, Send, StartTimer
from penstock.messages.flow import SampleFailed, SampleGenerated, SampleScored, SamplesSettled, ScoringFailed
from penstock.messages.local import SampleJudged, Started, TimerFired
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.names import FILTER
from penstock.messages.samples import Loss
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.actors.scorer.settings import ScorerSettings
    from penstock.messages.base import Metric
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import ScorerEvent
    from penstock.messages.samples import Reward, Sample, SampleKey

SWEEP_TIMER: Final = "sweep"


class Pending(msgspec.Struct):
    """One sample being scored."""

    event: SampleGenerated
    num_tries: int
    sweep: int


@final
class Scorer:
    """The Scorer's state machine."""

    def __init__(self, settings: ScorerSettings) -> None:
        self.settings = settings
        self.pending: dict[SampleKey, Pending] = {}
        self._sweep = 0
        self._has_judged = False
        """Since the last sweep."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "scoring" if self.pending else "idle"

    def leases(self) -> tuple[HeldLease, ...]:
        """The samples being scored."""
        return tuple(
            HeldLease(key, item.event.sample.attempt, LeaseStage.RUNNING, item.event.sample.num_tokens)
            for key, item in self.pending.items()
        )

    def waits(self) -> tuple[Wait, ...]:
        """Rewards."""
        return tuple(several("reward of", OWN_BACKEND, [(key, item.num_tries) for key, item in self.pending.items()]))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: the backend has gauges."""
        return ()

    def handle(self, event: ScorerEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case SampleGenerated():
                self._on_generated(event)
            case SampleJudged():
                self._has_judged = True
                item = self.pending.get(event.key)
                if item is not None and item.event.sample.attempt == event.attempt:
                    self._on_judged(item, event.reward, event.reason)
            case SampleFailed():
                self._out.append(Send(FILTER, event))
            case SamplesSettled():
                settled = event.settled
                above = frozenset(settled.above)
                for key in [k for k in self.pending if k.group_id < settled.floor or k.group_id in above]:
                    del self.pending[key]
            case TimerFired():
                self._on_sweep()
            case Started():
                self._start_sweep()
            case _:
                assert_never(event)
        out, self._out = self._out, []
        return out

    def _on_generated(self, event: SampleGenerated) -> None:
        key = event.sample.key
        if key in self.pending:
            return
        if event.sample.outcome.reward is not None or event.sample.loss is Loss.SUPERVISED:
            self._pass_on(event, event.sample)
            return
        self.pending[key] = Pending(event, 0, self._sweep)
        self._score(self.pending[key])

    def _score(self, item: Pending) -> None:
        item.sweep = self._sweep
        event = item.event
        self._out.append(Score(sample=event.sample, prompt=event.prompt, timeout_s=self.settings.timeout_s))

    def _on_judged(self, item: Pending, reward: Reward | None, reason: str) -> None:
        event = item.event
        sample = event.sample
        if reward is None and item.num_tries < self.settings.num_retries:
            item.num_tries += 1
            self._score(item)
            return
        del self.pending[sample.key]
        if reward is not None:
            outcome = msgspec.structs.replace(sample.outcome, reward=reward)
            self._pass_on(event, msgspec.structs.replace(sample, outcome=outcome))
            return
        failed = ScoringFailed(
            key=sample.key,
            attempt=sample.attempt,
            group_size=event.group_size,
            purpose=event.purpose,
            prompt=event.prompt,
            reason=reason,
            num_tokens=sample.num_tokens,
        )
        self._out.append(Send(FILTER, failed))

    def _pass_on(self, event: SampleGenerated, sample: Sample) -> None:
        scored = SampleScored(sample=sample, group_size=event.group_size, purpose=event.purpose, prompt=event.prompt)
        self._out.append(Send(FILTER, scored))

    def _start_sweep(self) -> None:
        self._out.append(StartTimer(SWEEP_TIMER, self.settings.timeout_s + self.settings.grace_s))

    def _on_sweep(self) -> None:
        """A backend that was asked before the last sweep and has answered nothing since has lost it all. One that
        answers is only behind."""
        silent = not self._has_judged
        self._sweep += 1
        self._has_judged = False
        if silent:
            for item in [item for item in self.pending.values() if item.sweep < self._sweep - 1]:
                self._on_judged(item, None, "the reward backend did not answer")
        self._start_sweep()

    def validate(self) -> None:
        """Assert the invariants."""
        for key, item in self.pending.items():
            assert key == item.event.sample.key
            assert item.num_tries <= self.settings.num_retries
            assert item.event.sample.outcome.reward is None
