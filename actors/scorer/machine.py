"""The Scorer: rewards in flight, their deadlines and retries, and what teachers say. It never turns an error into a
reward.

Invariants:

* Each sample that comes in goes out once: scored, or failed with the reason.
* Only a reward function gives a reward, or the episode itself: a sample that comes with one is passed on as it is, and
  so is one that is imitated, which needs none. A call that fails, hangs or returns nonsense is tried again (while
  every one fails, the first ones only); then the sample is passed on as ``ScoringFailed``.
* Where a function scores groups, it is asked once for all samples of a group, when all have ended. What none of them
  has failed with fails nobody else: a call that gives one sample no reward is made again as a whole, and in the end
  those that have rewards go on with them.
* Where a run has teachers, a sample for its objective goes on when both its reward and a teacher's log-probs are there.
  It fails with the first of the two that cannot be had.

| waits for | who ends it |
|---|---|
| a reward | the backend, which ends each call at ``timeout_s``; when it answers nothing for longer, a sweep |
| the other samples of a group | the engines; what fails comes as ``SampleFailed``; the Filter says what it gives up,
  and shows a Scorer that took another's place what that one had passed on |
| a teacher's answer | its backend; its loss, after which another is asked; a sweep, which has a silent one replaced |
| a teacher to be ready | its backend; a sweep, which has one replaced that is not within ``teacher_start_timeout_s`` |
| a place at a teacher | an answer, or a teacher that joins: the supervisor replaces those that are lost |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.actors.first_failures import FirstFailures
from penstock.actors.scorer.group_scoring import GroupScoring
from penstock.actors.scorer.pending import NO_ANSWER, SUPERSEDED, Pending, asked_together, unanswered
from penstock.actors.scorer.reward_alarms import RewardAlarms
from penstock.actors.scorer.teachers import Teachers, Verdict, texts_for_teacher
from penstock.actors.scorer.workload import Workload
from penstock.actors.settled import KnownSettled
from penstock.actors.waits import several
from penstock.messages.commands import Send, StartTimer
from penstock.messages.flow import (
    PlacesGivenUp,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
)
from penstock.messages.local import GroupScored, SampleJudged, Started, TimerFired
from penstock.messages.membership import ActorLost, ActorReturned, HeldLease, LeaseStage, LineRestored
from penstock.messages.names import FILTER, PROMPT_SOURCE, SCORER, SUPERVISOR
from penstock.messages.samples import Loss, Purpose, Reward, SampleKey
from penstock.messages.teaching import TeacherAnswered
from penstock.messages.training import NoticeGiven
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import EngineReady

if TYPE_CHECKING:
    from penstock.actors.scorer.group_scoring import HeldGroup
    from penstock.actors.scorer.settings import ScorerSettings
    from penstock.messages.base import Metric
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import ScorerEvent
    from penstock.messages.samples import Sample
    from penstock.messages.training import Activity

SWEEP_TIMER: Final = "sweep"
TEACHER_TIMER: Final = "teacher"


@final
class Scorer:
    """The Scorer's state machine."""

    def __init__(self, settings: ScorerSettings) -> None:
        self.settings = settings
        self.pending: dict[SampleKey, Pending] = {}
        self.teachers = Teachers(settings)
        self.held = GroupScoring()
        self.alarms = RewardAlarms(settings)
        self.workload = Workload(settings.workers)
        self._failures = FirstFailures(SCORER)
        self._num_fruitless: int | None = 0
        """Calls that have failed; None: some call has given a reward."""
        self._sweep = 0
        self._has_judged = False
        """Since the last sweep."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "scoring" if self.pending else "idle"

    @property
    def shows(self) -> tuple[Activity, float, float]:
        """See :class:`penstock.actors.machine.Accounted`; a worker that waits for a judge or a service has a call."""
        return self.workload.activity, self.workload.occupancy, 0.0

    def leases(self) -> tuple[HeldLease, ...]:
        """The samples being scored."""
        return tuple(
            HeldLease(key, item.event.sample.attempt, LeaseStage.RUNNING, item.event.sample.num_tokens)
            for key, item in self.pending.items()
        )

    def waits(self) -> tuple[Wait, ...]:
        """Rewards and answers of teachers."""
        unjudged = [
            (k, item.num_tries) for k, item in self.pending.items() if item.reward is None and self._is_asked(k)
        ]
        lacking = several("sample", PROMPT_SOURCE, self.held.lacking())
        return (*several("reward of", OWN_BACKEND, unjudged), *lacking, *self.teachers.waits())

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What alarms look at; the backend has gauges."""
        return self.alarms.metrics

    def handle(self, event: ScorerEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case SampleGenerated():
                self._on_generated(event)
            case SampleJudged():
                self._has_judged = True
                item = self.pending.get(event.key)
                if item is not None and item.event.sample.attempt == event.attempt and item.reward is None:
                    self._on_judged(item, event.reward, event.reason)
            case GroupScored():
                self._has_judged = True
                self._on_group_scored(event)
            case PlacesGivenUp():
                for group in self.held.give_up(event.places):
                    self._ask_when_due(group)
            case TeacherAnswered():
                verdict = self.teachers.answered(event)
                self._on_verdicts([] if verdict is None else [verdict])
            case EngineReady():
                self._on_verdicts(self.teachers.ready(event.engine, event.engine_epoch, event.num_slots))
            case ActorReturned():
                self.teachers.joined(event.name, event.epoch)
            case ActorLost():
                self._on_verdicts(self.teachers.lost(event.name, event.epoch))
            case LineRestored():
                self._out += self.teachers.restored(event.name)
            case SampleFailed():
                self._out.append(Send(FILTER, event))
                self._note_failed(event)
            case SamplesSettled():
                settled = KnownSettled(event.settled)
                for key in [key for key in self.pending if key.group_id in settled]:
                    del self.pending[key]
                    self.teachers.forget(key)
                self.held.forget(settled)
                self.workload.forget(settled)
                self.alarms.forget(settled)
            case TimerFired():
                if event.key == TEACHER_TIMER:
                    self._out += self.teachers.sweep()
                    self._start_teacher_sweep()
                else:
                    self._on_sweep()
            case Started():
                self.workload.has_started = True
                self._start_sweep()
                self._start_teacher_sweep()
            case _:
                assert_never(event)
        if self.settings.teachers:
            self._out += self.teachers.dispatch()
        out, self._out = self._out, []
        return out

    def _on_generated(self, event: SampleGenerated) -> None:
        key = event.sample.key
        if key in self.pending:
            return
        sample, needs_teacher = event.sample, self._needs_teacher(event)
        reward = sample.outcome.reward
        needs_reward = reward is None and sample.loss is Loss.OBJECTIVE
        if needs_reward or needs_teacher:
            item = self.pending[key] = Pending(event, 0, self._sweep, reward, None if needs_teacher else ())
            if needs_reward and event.purpose not in self.settings.whole_groups:
                self._score(item)
        else:
            self._pass_on(event, sample)
        if event.purpose in self.settings.whole_groups:
            self._hold(event, needs_reward=needs_reward)
        if needs_teacher and key in self.pending:
            self.teachers.ask(key, sample.attempt, texts_for_teacher(event.prompt, sample))

    def _needs_teacher(self, event: SampleGenerated) -> bool:
        """Only what the objective trains, and has something to be asked about, costs a teacher's time."""
        if not self.settings.teachers:
            return False
        sample = event.sample
        return event.purpose is Purpose.TRAIN and sample.loss is Loss.OBJECTIVE and sample.num_tokens > 0

    def _score(self, item: Pending) -> None:
        item.sweep = self._sweep
        self.workload.calls.add(item.event.sample.key)
        self._out.append(item.asked(self.settings.timeout_s))

    def _on_judged(self, item: Pending, reward: Reward | None, reason: str) -> None:
        self.workload.calls.discard(item.event.sample.key)
        if reward is not None:
            self._num_fruitless = None
            item.reward = reward
            self._complete(item)
            return
        self._hear_failure(item.event.sample.key, reason)
        if self._tries_again(item.num_tries):
            item.num_tries += 1
            self._score(item)
        else:
            self._fail(item, reason)

    def _hear_failure(self, key: SampleKey, reason: str) -> None:
        self._out += self._failures.hear(f"the reward of sample {key}", reason)
        if self._num_fruitless is not None:
            self._num_fruitless += 1

    def _tries_again(self, num_tries: int) -> bool:
        limit = self.settings.fruitless_calls
        is_fruitless = limit > 0 and self._num_fruitless is not None and self._num_fruitless > limit
        return num_tries < self.settings.num_retries and not is_fruitless

    # --- whole groups -----------------------------------------------------------------------------------------

    def _hold(self, event: SampleGenerated, *, needs_reward: bool) -> None:
        key = event.sample.key
        group = self.held.of(key.group_id, event.group_size, refills=event.purpose is Purpose.TRAIN)
        group.failed.discard(key.index)  # it may have been said to have failed; now it has come after all
        group.here[key.index] = needs_reward
        for index in group.superseded():
            self._fail(self.pending[SampleKey(key.group_id, index)], SUPERSEDED)
        self._ask_when_due(group)

    def _note_failed(self, event: SampleFailed | ScoringFailed) -> None:
        """It may be the last that its group has waited for."""
        if event.purpose not in self.settings.whole_groups:
            return
        group = self.held.of(event.key.group_id, event.group_size, refills=event.purpose is Purpose.TRAIN)
        if event.key not in self.pending:
            group.fail(event.key.index)
            self._ask_when_due(group)

    def _ask_when_due(self, group: HeldGroup) -> None:
        if group.is_due:
            group.num_tries = 0
            self._score_group(group, group.waiting)

    def _score_group(self, group: HeldGroup, indices: tuple[int, ...]) -> None:
        group.asked, group.sweep = indices, self._sweep
        self.workload.calls.add(group.group_id)
        items = [self.pending[SampleKey(group.group_id, index)] for index in indices]
        self._out.append(asked_together(items, self.settings.timeout_s))

    def _on_group_scored(self, event: GroupScored) -> None:
        group = self.held.groups.get(event.group_id)
        if group is None or tuple(judged.key.index for judged in event.samples) != group.asked:
            return
        self.workload.calls.discard(group.group_id)
        asked = [(self.pending.get(judged.key), judged) for judged in event.samples]
        open_ones = [
            (item, judged) for item, judged in asked if item is not None and item.event.sample.attempt == judged.attempt
        ]
        failed = [(item, judged) for item, judged in open_ones if judged.reward is None]
        if len(failed) < len(open_ones):
            self._num_fruitless = None
        for _, judged in failed:
            self._hear_failure(judged.key, judged.reason)
        if failed and self._tries_again(group.num_tries):
            group.num_tries += 1
            self._score_group(group, tuple(judged.key.index for _, judged in open_ones))
            return
        for item, judged in open_ones:
            if judged.reward is not None:
                group.here[judged.key.index] = False
                item.reward = judged.reward
                self._complete(item)
        for item, judged in failed:
            self._fail(item, judged.reason)
        group.asked = ()
        self._ask_when_due(group)

    def _is_asked(self, key: SampleKey) -> bool:
        """Whether the backend works on this one; samples of groups wait for the others first."""
        if self.pending[key].event.purpose not in self.settings.whole_groups:
            return True
        return key.index in self.held.groups[key.group_id].asked

    # --- ends -------------------------------------------------------------------------------------------------

    def _on_verdicts(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            item = self.pending[verdict.key]
            if verdict.logprobs is None:
                self._fail(item, verdict.reason)
            else:
                item.teacher_logprobs, item.teacher_top = verdict.logprobs, verdict.top
                self._complete(item)

    def _complete(self, item: Pending) -> None:
        """Send the sample on when nothing is missing any more."""
        if item.is_whole:
            del self.pending[item.event.sample.key]
            self._pass_on(item.event, item.whole())

    def _fail(self, item: Pending, reason: str) -> None:
        key = item.event.sample.key
        del self.pending[key]
        self.workload.calls.discard(key)
        self.teachers.forget(key)
        failed = item.failed(reason)
        self._out.append(Send(FILTER, failed))
        self._note_failed(failed)
        if item.reward is None and failed.purpose is Purpose.TRAIN:
            self._say(self.alarms.failed())

    def _pass_on(self, event: SampleGenerated, sample: Sample) -> None:
        scored = SampleScored(sample=sample, group_size=event.group_size, purpose=event.purpose, prompt=event.prompt)
        self._out.append(Send(FILTER, scored))
        if sample.reward is not None and sample.loss is Loss.OBJECTIVE and event.purpose is Purpose.TRAIN:
            self._say(self.alarms.scored(sample.key, event.group_size, sample.reward))

    def _say(self, texts: list[str]) -> None:
        for text in texts:
            self._out.append(Send(SUPERVISOR, NoticeGiven(name=SCORER, text=text, is_warning=True)))

    def _start_sweep(self) -> None:
        self._out.append(StartTimer(SWEEP_TIMER, self.settings.timeout_s + self.settings.grace_s))

    def _start_teacher_sweep(self) -> None:
        if self.settings.teachers:
            self._out.append(StartTimer(TEACHER_TIMER, self.settings.teacher_timeout_s))

    def _on_sweep(self) -> None:
        """A backend that was asked before the last sweep and has answered nothing since has lost it all. One that
        answers is only behind."""
        silent = not self._has_judged
        self._sweep += 1
        self._has_judged = False
        if silent:
            whole = self.settings.whole_groups
            unjudged = [i for i in self.pending.values() if i.reward is None and i.event.purpose not in whole]
            for item in [item for item in unjudged if item.sweep < self._sweep - 1]:
                self._on_judged(item, None, NO_ANSWER)
            for group in self.held.overdue(self._sweep - 1):
                self._on_group_scored(unanswered(group, self.pending))
        self._start_sweep()

    def validate(self) -> None:
        """Assert the invariants."""
        self.teachers.validate()
        whole = self.settings.whole_groups
        unjudged = {k for k, i in self.pending.items() if i.reward is None and i.event.purpose in whole}
        self.held.validate(unjudged, self.settings.num_retries)
        alone = {k for k, i in self.pending.items() if i.reward is None and i.event.purpose not in whole}
        assert self.workload.calls == alone | {g.group_id for g in self.held.groups.values() if g.asked}
        for key, item in self.pending.items():
            assert key == item.event.sample.key
            assert item.num_tries <= self.settings.num_retries
            assert item.reward is None or item.teacher_logprobs is None, f"{key} is whole and still here"
            assert (item.teacher_logprobs is None) == (key in self.teachers.questions)
        assert self.teachers.questions.keys() <= self.pending.keys()
