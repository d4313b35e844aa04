"""Prompts, rewards and verdicts that cost modelled time, on whatever clock they are given.

Invariants:

* A reward is a pure function of the run's seed and the sample's key; so is the verdict on a group.
* Every command is answered exactly once, also when the reward fails or would never come: then at its deadline.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from penstock.backends.data.row_chooser import RowChooser
from penstock.backends.draws import mixed, normal, uniform
from penstock.backends.rewards.options import SimulatedRewardOptions
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import ChooseRows, JudgeSamples, KeepSamples, Score, ShowGroup
from penstock.messages.local import (
    DroppedSample,
    FetchedPrompt,
    GroupJudged,
    GroupScored,
    PromptsFetched,
    RowsDrawn,
    SampleJudged,
    SamplesJudged,
)
from penstock.messages.samples import Prompt, Reward

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.data.row_chooser import ChoosingSettings, RowRecord
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.base import Metric
    from penstock.messages.commands import FilterCommand, PromptCommand, PromptRequest, ScoreGroup
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import SampleKey

_REWARD, _FAILS, _HANGS, _VERDICT, _TOKENS, _RECORDED, _DROPS, _CHOOSES, _RETRIES, _CONSTANT, _LATENCY = range(11)
"""Streams of random numbers of one run."""


class JudgingModel(SimulatedRewardOptions, frozen=True, kw_only=True):
    """How simulated rewards and verdicts come about: as a scenario says, and with what only trials ask for."""

    failure_rate: float = 0.0
    """Share of samples whose reward function raises."""
    hang_rate: float = 0.0
    """Share of samples whose reward function never returns."""
    rejection_rate: float = 0.0
    """Share of groups that the user's filter turns away."""
    drop_rate: float = 0.0
    """Share of samples that the user's filter of samples drops."""


class _Answering:
    """What the simulated backends without state share."""

    def __init__(self, *, seed: int, timers: Timers) -> None:
        self._seed = seed
        self._timers = timers

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit

    def gauges(self) -> tuple[Metric, ...]:
        """Nothing to tell."""
        return ()

    def close(self, timeout_s: float) -> None:
        """Nothing to end: the clock is not ours."""

    def _answer_after(self, delay_s: float, answer: LocalEvent) -> None:
        self._timers.call_later(delay_s, lambda: self._emit(answer))


class SimulatedPrompts(_Answering):
    """Rows of random tokens, all of one length."""

    def __init__(
        self,
        *,
        seed: int,
        prompt_tokens: int,
        latency_s: float,
        timers: Timers,
        are_mixed: bool = False,
        own_retries: tuple[int, ...] = (),
        choosing: ChoosingSettings | None = None,
    ) -> None:
        """
        Args:
            seed: of the run.
            prompt_tokens: of each prompt.
            latency_s: of an answer.
            timers: the clock.
            are_mixed: about half of the rows are for engines that know the rows.
            own_retries: about half of the rows say that they are issued again so often, each one of these numbers.
            choosing: how rows are chosen, where they are; of a curriculum, which is modelled, those that earn least.
        """
        super().__init__(seed=seed, timers=timers)
        self._are_mixed = are_mixed
        self._own_retries = own_retries
        self._chooser = None if choosing is None else RowChooser(choosing, _least_earned)
        self._prompt_tokens = prompt_tokens
        self._latency_s = latency_s

    def take_over(self, chosen: Iterable[ChooseRows]) -> None:
        """Stand where another backend stood, which has answered these: the history of each row follows from them."""
        for command in chosen:
            assert self._chooser is not None, "the scenario says how rows are chosen"
            self._chooser.choose(command)

    def execute(self, command: PromptCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        if isinstance(command, ChooseRows):
            assert self._chooser is not None, "the scenario says how rows are chosen"
            self._answer_after(self._latency_s, RowsDrawn(rows=self._chooser.choose(command)))
            return
        prompts = tuple(FetchedPrompt(request.group_id, self._prompt(request)) for request in command.requests)
        self._answer_after(self._latency_s, PromptsFetched(prompts=prompts))

    def _prompt(self, request: PromptRequest) -> Prompt:
        first = mixed(self._seed, _TOKENS, request.row) % 1000
        tokens = pack_tokens((first + t) % 1000 for t in range(self._prompt_tokens))
        may_be_recorded = self._are_mixed and request.dataset is None
        return Prompt(
            row=request.row,
            epoch=request.epoch,
            tokens=tokens,
            label=str(first),
            is_recorded=may_be_recorded and uniform(self._seed, _RECORDED, request.row) < 0.5,
            dataset=request.dataset,
            num_retries=self._retries_of(request),
        )

    def _retries_of(self, request: PromptRequest) -> int | None:
        where = (self._seed, request.row, 0 if request.dataset is None else 1 + request.dataset)
        if not self._own_retries or uniform(_CHOOSES, *where) < 0.5:
            return None
        return self._own_retries[mixed(_RETRIES, *where) % len(self._own_retries)]


class SimulatedScorer(_Answering):
    """Rewards of 0 and 1, with failures and hangs where the model says so."""

    def __init__(self, model: JudgingModel, *, seed: int, timers: Timers) -> None:
        super().__init__(seed=seed, timers=timers)
        self._model = model
        self._free_s = [0.0] * (model.num_workers or 0)
        """When each worker has done what it has; a heap."""

    def execute(self, command: Score | ScoreGroup, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        if isinstance(command, Score):
            delay_s, answer = self._judged(command.sample.key, command.sample.attempt, command.timeout_s)
            self._answer_after(self._worked_off(delay_s), answer)
            return
        each = [self._judged(sample.key, sample.attempt, command.timeout_s) for sample in command.samples]
        group_id = command.samples[0].key.group_id
        scored = GroupScored(group_id=group_id, samples=tuple(answer for _, answer in each))
        self._answer_after(self._worked_off(max(delay_s for delay_s, _ in each)), scored)

    def _worked_off(self, duration_s: float) -> float:
        """In how long a worker will have done this too."""
        if not self._free_s:
            return duration_s
        now_s = self._timers.now_s()
        done_s = max(now_s, self._free_s[0]) + duration_s
        heapq.heapreplace(self._free_s, done_s)
        return done_s - now_s

    def _judged(self, key: SampleKey, attempt: int, timeout_s: float) -> tuple[float, SampleJudged]:
        """When the answer comes, and which."""
        model, where = self._model, (key.group_id, key.index)
        if model.hang_rate and uniform(self._seed, _HANGS, *where) < model.hang_rate:
            reason = "no reward within its deadline"
            return timeout_s, SampleJudged(key=key, attempt=attempt, reward=None, reason=reason)
        if model.failure_rate and uniform(self._seed, _FAILS, *where) < model.failure_rate:
            reason = "simulated failure of the reward"
            return model.latency_s, SampleJudged(key=key, attempt=attempt, reward=None, reason=reason)
        is_constant = model.constant_rate and uniform(self._seed, _CONSTANT, key.group_id) < model.constant_rate
        drawn = uniform(self._seed, _REWARD, *((key.group_id,) if is_constant else where))
        value = float(drawn < model.success_rate)
        latency_s = model.latency_s
        if model.latency_sigma:
            latency_s *= math.exp(model.latency_sigma * normal(self._seed, _LATENCY, *where, attempt))
        judged = SampleJudged(key=key, attempt=attempt, reward=Reward(value=value))
        return min(timeout_s, latency_s), judged


class SimulatedJudge(_Answering):
    """Verdicts of a group filter."""

    def __init__(self, model: JudgingModel, *, seed: int, timers: Timers) -> None:
        super().__init__(seed=seed, timers=timers)
        self._model = model

    def execute(self, command: FilterCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        group_id = command.group.group_id
        if isinstance(command, ShowGroup | KeepSamples):
            return  # nobody looks
        if isinstance(command, JudgeSamples):
            keys = [sample.key for sample in command.group.samples]
            dropped = tuple(
                DroppedSample(key.index, "simulated verdict")
                for key in keys
                if uniform(self._seed, _DROPS, key.group_id, key.index) < self._model.drop_rate
            )
            self._answer_after(self._model.latency_s, SamplesJudged(group_id=group_id, dropped=dropped))
            return
        keep = uniform(self._seed, _VERDICT, group_id) >= self._model.rejection_rate
        answer = GroupJudged(group_id=group_id, keep=keep, cause="" if keep else "simulated verdict")
        self._answer_after(self._model.latency_s, answer)


def _least_earned(rows: Sequence[tuple[int, RowRecord]]) -> list[float | None]:
    return [-1.0 if record.mean_reward is None else -record.mean_reward for _, record in rows]
