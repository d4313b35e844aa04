"""The Filter's backend where a scenario has more than a filter of groups: a filter of samples, a hook for all groups;
and what asks a curriculum.

Invariants:

* Each ``JudgeSamples`` is answered by one ``SamplesJudged``. A sample on which the filter fails is dropped, with a
  cause of its own.
* Whatever happens to the hook (it raises, hangs, cannot be loaded, is too slow) is counted, and changes nothing else.
* A prompt that a curriculum has no number for when its deadline comes, or fails on, counts as 0.

| waits for | who ends it |
|---|---|
| the verdicts on the samples of a group | the function; each call has ``SAMPLE_TIMEOUT_S`` |
| the weights of prompts | the function; the deadline of the scenario for all of them |
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.rewards.pool import WorkerPool
from penstock.backends.rewards.sample_calls import filter_call, reward_call
from penstock.backends.rewards.sampling_calls import (
    HOOK,
    PRIORITY,
    SAMPLE_FILTER,
    SAMPLE_TIMEOUT_S,
    PriorityCall,
    PromptHistory,
    RewardedCall,
    Verdict,
)
from penstock.backends.rewards.wire import CallFailed, Judged, Kept, SampleCall, ShowCall
from penstock.messages.base import Metric
from penstock.messages.commands import JudgeGroup, JudgeSamples, KeepSamples, ShowGroup
from penstock.messages.local import DroppedSample, SamplesJudged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.ledger.kept_samples import SampleKeeper
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.rewards.sample_calls import ResponseText
    from penstock.backends.rewards.wire import Answer
    from penstock.messages.commands import FilterCommand
    from penstock.messages.samples import Prompt, Sample

HOOK_TIMEOUT_S: Final = 30.0
NUM_SAMPLE_WORKERS: Final = 2
MAX_SHOWN_WAITING: Final = 1000
"""Groups that may wait for the hook; those that come meanwhile are not shown."""
SAMPLE_FILTER_ERROR: Final = "sample_filter_error"
"""The cause of a sample that was dropped because the user's filter failed on it."""
USER_SAMPLE_FILTER: Final = "user_sample_filter"

_LOG: Final = logging.getLogger(__name__)


class _Sifting:
    """One group whose samples are being judged."""

    def __init__(self, command: JudgeSamples) -> None:
        self.group = command.group
        self.num_left = len(command.group.samples)
        self.dropped: list[DroppedSample] = []


class _SampleTask(NamedTuple):
    sifting: _Sifting
    sample: Sample


class SampleSifter(WorkerPool[_SampleTask]):
    """Asks the filter of samples, in processes."""

    def __init__(self, spec: str, text: ResponseText) -> None:
        super().__init__(SAMPLE_FILTER, spec, NUM_SAMPLE_WORKERS)
        self._text = text

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A filter that cannot be loaded comes to ``fail``."""
        self._emit = emit
        self._begin(fail)

    def execute(self, command: JudgeSamples, /) -> None:
        """Have the samples of a group judged."""
        sifting = _Sifting(command)
        for sample in command.group.samples:
            self.submit(_SampleTask(sifting, sample))
        if not command.group.samples:
            self._emit(SamplesJudged(group_id=command.group.group_id, dropped=()))

    def gauges(self) -> tuple[Metric, ...]:
        """Calls that wait, and failures so far."""
        return (
            Metric("filter/samples_waiting", float(self.num_waiting + self.num_running)),
            Metric("filter/samples_failed", float(self.num_failed)),
        )

    def _call(self, command: _SampleTask, call_id: int, names: tuple[str, ...]) -> SampleCall:
        sample, prompt = command.sample, command.sifting.group.prompt
        reward = sample.outcome.reward
        rewarded = RewardedCall(
            None if reward is None else reward.value,
            () if reward is None else tuple((item.name, item.value) for item in reward.components),
            str(type(sample.outcome).__struct_config__.tag),
        )
        call = reward_call(sample, prompt, SAMPLE_TIMEOUT_S, call_id, self._text, frozenset(names))
        return SampleCall(call_id, SAMPLE_TIMEOUT_S, call, rewarded)

    def _on_answer(self, command: _SampleTask, answer: Answer) -> None:
        sifting, key = command.sifting, command.sample.key
        if isinstance(answer, CallFailed):
            _LOG.warning("sample %s is dropped because the filter failed on it: %s", key, answer.reason)
            sifting.dropped.append(DroppedSample(key.index, SAMPLE_FILTER_ERROR, answer.reason))
        else:
            assert isinstance(answer, Kept)
            if not answer.keep:
                sifting.dropped.append(DroppedSample(key.index, answer.cause or USER_SAMPLE_FILTER))
        sifting.num_left -= 1
        if not sifting.num_left:
            dropped = tuple(sorted(sifting.dropped, key=lambda item: item.index))
            self._emit(SamplesJudged(group_id=sifting.group.group_id, dropped=dropped))


class GroupShower(WorkerPool[ShowGroup]):
    """Shows groups to the user's hook, in a process."""

    def __init__(self, spec: str, text: ResponseText) -> None:
        super().__init__(HOOK, spec)
        self._text = text
        self._num_skipped = 0
        self._is_off = False

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. Nothing comes to ``fail``."""
        self._begin(self._on_failure)

    def _on_failure(self, error: BaseException) -> None:
        self._is_off = True
        _LOG.error("the hook for all samples is off: %s", error)

    def execute(self, command: ShowGroup, /) -> None:
        """Show a group, if there is room for it."""
        if self._is_off or self.num_waiting >= MAX_SHOWN_WAITING:
            self._num_skipped += 1
        else:
            self.submit(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Totals: groups that were shown, on which the hook failed, and that were not shown."""
        num_unshown = self._num_skipped + (self.num_waiting + self.num_running if self._is_off else 0)
        return (
            Metric("filter/hook_shown", float(self.num_answered)),
            Metric("filter/hook_failed", float(self.num_failed)),
            Metric("filter/hook_skipped", float(num_unshown)),
        )

    def _call(self, command: ShowGroup, call_id: int, names: tuple[str, ...]) -> ShowCall:
        shown = filter_call(command.group, HOOK_TIMEOUT_S, call_id, self._text, names)
        return ShowCall(call_id, HOOK_TIMEOUT_S, shown, Verdict(not command.cause, command.cause))

    def _on_answer(self, command: ShowGroup, answer: Answer) -> None:
        if isinstance(answer, CallFailed):
            _LOG.warning("the hook failed on group %d: %s", command.group.group_id, answer.reason)


class FilterFunctions:
    """Everything that the Filter asks of users' functions, and what keeps samples for people."""

    def __init__(
        self,
        judge: Backend[JudgeGroup],
        sifter: SampleSifter | None,
        shower: GroupShower | None,
        keeper: SampleKeeper | None = None,
    ) -> None:
        self._judge = judge
        self._sifter = sifter
        self._shower = shower
        self._keeper = keeper

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._fail = fail
        self._judge.start(emit, fail)
        if self._sifter is not None:
            self._sifter.start(emit, fail)
        if self._shower is not None:
            self._shower.start(emit, fail)

    def execute(self, command: FilterCommand, /) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        match command:
            case JudgeGroup():
                self._judge.execute(command)
            case JudgeSamples():
                assert self._sifter is not None, "the scenario names a function for samples"
                self._sifter.execute(command)
            case ShowGroup():
                assert self._shower is not None, "the scenario names a hook"
                self._shower.execute(command)
            case KeepSamples():
                assert self._keeper is not None, "the scenario keeps samples"
                self._keeper.keep(command, self._fail)

    def gauges(self) -> tuple[Metric, ...]:
        """Of all of them."""
        parts = (part for part in (self._judge, self._sifter, self._shower, self._keeper) if part is not None)
        return tuple(metric for part in parts for metric in part.gauges())

    def close(self, timeout_s: float) -> None:
        """Kill the processes, and write the samples that wait to be."""
        for part in (self._judge, self._sifter, self._shower, self._keeper):
            if part is not None:
                part.close(timeout_s)


class _Weighing:
    """Prompts that are weighed together."""

    def __init__(self, size: int) -> None:
        self.values: list[float | None] = [0.0] * size
        self.num_left = size
        self.done = threading.Event()


class _PromptTask(NamedTuple):
    weighing: _Weighing
    place: int
    prompt: Prompt
    history: PromptHistory


class PriorityFunction(WorkerPool[_PromptTask]):
    """Asks the user's curriculum, in a process, and waits for it."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        super().__init__(PRIORITY, spec, timeout_key="prompt_source.priority_timeout_s")
        self._timeout_s = timeout_s
        self.num_late = 0
        """Prompts that had no number when the deadline came."""

    def start(self, fail: Fail) -> None:
        """Start the process. A function that cannot be loaded comes to ``fail``."""
        self._begin(fail)

    def weigh(self, prompts: Sequence[tuple[Prompt, PromptHistory]]) -> list[float | None]:
        """The weights, in order; returns at the deadline at the latest."""
        weighing = _Weighing(len(prompts))
        until_s = time.monotonic() + self._timeout_s
        for place, (prompt, history) in enumerate(prompts):
            self.submit(_PromptTask(weighing, place, prompt, history))
        if prompts and not weighing.done.wait(max(0.0, until_s - time.monotonic())):
            self.num_late += weighing.num_left
            _LOG.warning(
                "%d of %d prompts have no priority within %g s", weighing.num_left, len(prompts), self._timeout_s
            )
        return list(weighing.values)

    def _call(self, command: _PromptTask, call_id: int, names: tuple[str, ...]) -> PriorityCall:
        prompt = command.prompt
        return PriorityCall(
            id=call_id,
            timeout_s=self._timeout_s,
            prompt=prompt.text,
            label=prompt.label,
            metadata=prompt.metadata if "metadata" in names else b"",
            prompt_tokens=prompt.tokens if "prompt_tokens" in names else b"",
            row=prompt.row,
            history=command.history,
        )

    def _on_answer(self, command: _PromptTask, answer: Answer) -> None:
        weighing = command.weighing
        match answer:
            case Judged():
                weighing.values[command.place] = answer.value
            case Kept():
                weighing.values[command.place] = None
            case CallFailed():
                _LOG.warning("no priority for row %d: %s", command.prompt.row, answer.reason)
                weighing.values[command.place] = 0.0
            case _:
                raise AssertionError(answer)
        weighing.num_left -= 1
        if not weighing.num_left:
            weighing.done.set()
