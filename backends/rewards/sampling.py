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
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.rewards.call_adapters import reward_call
from penstock.backends.rewards.pool import WorkerPool
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
from penstock.backends.rewards.wire import CallFailed, FilterCall, Judged, Kept, SampleCall, ShowCall
from penstock.messages.base import Metric
from penstock.messages.commands import JudgeGroup, JudgeSamples, KeepSamples, ShowGroup
from penstock.messages.local import DroppedSample, SamplesJudged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.ledger.kept_samples import SampleKeeper
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.rewards.call_adapters import ResponseText
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

_ENCODER: Final = msgspec.msgpack.Encoder()
_LOG: Final = logging.getLogger(__name__)


class _Sifting:
    """One group whose samples are being judged."""

    def __init__(self, command: JudgeSamples) -> None:
        self.group = command.group
        self.num_left = len(command.group.samples)
        self.dropped: list[DroppedSample] = []


class _SampleTask:
    def __init__(self, sifting: _Sifting, sample: Sample) -> None:
        self.sifting = sifting
        self.sample = sample


class SampleFilterAdapter:
    """One sample to its verdict: none for one that is kept."""

    kind = SAMPLE_FILTER
    options_json = ""
    timeout_key = ""

    def __init__(self, spec: str, text: ResponseText) -> None:
        self.spec = spec
        self._text = text

    def call(self, command: _SampleTask, call_id: int, names: tuple[str, ...]) -> SampleCall:
        """See :class:`~penstock.backends.rewards.pool.CallAdapter`."""
        sample, prompt = command.sample, command.sifting.group.prompt
        reward = sample.outcome.reward
        rewarded = RewardedCall(
            None if reward is None else reward.value,
            () if reward is None else tuple((item.name, item.value) for item in reward.components),
            str(type(sample.outcome).__struct_config__.tag),
        )
        call = reward_call(sample, prompt, SAMPLE_TIMEOUT_S, call_id, self._text, frozenset(names))
        return SampleCall(call_id, SAMPLE_TIMEOUT_S, call, rewarded)

    def event(self, command: _SampleTask, answer: Answer) -> tuple[_SampleTask, DroppedSample | None]:
        """See :class:`~penstock.backends.rewards.pool.CallAdapter`."""
        index = command.sample.key.index
        if isinstance(answer, Kept):
            return command, None if answer.keep else DroppedSample(index, answer.cause or USER_SAMPLE_FILTER)
        assert isinstance(answer, CallFailed)
        _LOG.warning("sample %s is dropped because the filter failed on it: %s", command.sample.key, answer.reason)
        return command, DroppedSample(index, SAMPLE_FILTER_ERROR, answer.reason)


class SampleSifter:
    """Asks the filter of samples, in processes."""

    def __init__(self, adapter: SampleFilterAdapter) -> None:
        self._pool = WorkerPool[_SampleTask, "tuple[_SampleTask, DroppedSample | None]"](adapter, NUM_SAMPLE_WORKERS)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A filter that cannot be loaded comes to ``fail``."""
        self._emit = emit
        self._pool.start(self._on_verdict, fail)

    def execute(self, command: JudgeSamples, /) -> None:
        """Have the samples of a group judged."""
        sifting = _Sifting(command)
        for sample in command.group.samples:
            self._pool.submit(_SampleTask(sifting, sample))
        if not command.group.samples:
            self._emit(SamplesJudged(group_id=command.group.group_id, dropped=()))

    def _on_verdict(self, verdict: tuple[_SampleTask, DroppedSample | None]) -> None:
        """On the pool's one thread."""
        task, dropped_one = verdict
        sifting = task.sifting
        if dropped_one is not None:
            sifting.dropped.append(dropped_one)
        sifting.num_left -= 1
        if not sifting.num_left:
            dropped = tuple(sorted(sifting.dropped, key=lambda item: item.index))
            self._emit(SamplesJudged(group_id=sifting.group.group_id, dropped=dropped))

    def gauges(self) -> tuple[Metric, ...]:
        """Calls that wait, and failures so far."""
        return (
            Metric("filter/samples_waiting", float(self._pool.num_waiting + self._pool.num_running)),
            Metric("filter/samples_failed", float(self._pool.num_failed)),
        )

    def close(self, timeout_s: float) -> None:
        """Kill the processes."""
        self._pool.close(timeout_s)


class HookAdapter:
    """A group to the hook; the answer says only whether it failed."""

    kind = HOOK
    options_json = ""
    timeout_key = ""

    def __init__(self, spec: str, text: ResponseText) -> None:
        self.spec = spec
        self._text = text

    def call(self, command: ShowGroup, call_id: int, names: tuple[str, ...]) -> ShowCall:
        """See :class:`~penstock.backends.rewards.pool.CallAdapter`."""
        group = command.group
        responses = tuple(self._text.of(sample) for sample in group.samples) if "responses" in names else ()
        shown = FilterCall(call_id, HOOK_TIMEOUT_S, _ENCODER.encode(group), responses)
        return ShowCall(call_id, HOOK_TIMEOUT_S, shown, Verdict(not command.cause, command.cause))

    def event(self, command: ShowGroup, answer: Answer) -> None:
        """See :class:`~penstock.backends.rewards.pool.CallAdapter`."""
        if isinstance(answer, CallFailed):
            _LOG.warning("the hook failed on group %d: %s", command.group.group_id, answer.reason)


class GroupShower:
    """Shows groups to the user's hook, in a process."""

    def __init__(self, adapter: HookAdapter) -> None:
        self._pool = WorkerPool[ShowGroup, None](adapter, 1)
        self._num_skipped = 0
        self._is_off = False

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. Nothing comes to ``fail``."""
        self._pool.start(lambda _: None, self._on_failure)

    def _on_failure(self, error: BaseException) -> None:
        self._is_off = True
        _LOG.error("the hook for all samples is off: %s", error)

    def execute(self, command: ShowGroup, /) -> None:
        """Show a group, if there is room for it."""
        if self._is_off or self._pool.num_waiting >= MAX_SHOWN_WAITING:
            self._num_skipped += 1
        else:
            self._pool.submit(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Totals: groups that were shown, on which the hook failed, and that were not shown."""
        num_unshown = self._num_skipped + (self._pool.num_waiting + self._pool.num_running if self._is_off else 0)
        return (
            Metric("filter/hook_shown", float(self._pool.num_answered)),
            Metric("filter/hook_failed", float(self._pool.num_failed)),
            Metric("filter/hook_skipped", float(num_unshown)),
        )

    def close(self, timeout_s: float) -> None:
        """Kill the process."""
        self._pool.close(timeout_s)


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


class _PromptTask:
    def __init__(self, weighing: _Weighing, place: int, prompt: Prompt, history: PromptHistory) -> None:
        self.weighing = weighing
        self.place = place
        self.prompt = prompt
        self.history = history


class PriorityAdapter:
    """A prompt with its history to its weight."""

    kind = PRIORITY
    options_json = ""
    timeout_key = "prompt_source.priority_timeout_s"

    def __init__(self, spec: str, timeout_s: float) -> None:
        self.spec = spec
        self._timeout_s = timeout_s

    def call(self, command: _PromptTask, call_id: int, names: tuple[str, ...]) -> PriorityCall:
        """See :class:`~penstock.backends.rewards.pool.CallAdapter`."""
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

    def event(self, command: _PromptTask, answer: Answer) -> tuple[_PromptTask, float | None]:
        """See :class:`~penstock.backends.rewards.pool.CallAdapter`."""
        match answer:
            case Judged():
                return command, answer.value
            case Kept():
                return command, None
            case CallFailed():
                _LOG.warning("no priority for row %d: %s", command.prompt.row, answer.reason)
                return command, 0.0
            case _:
                raise AssertionError(answer)


class PriorityFunction:
    """Asks the user's curriculum, in a process, and waits for it."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._pool = WorkerPool[_PromptTask, "tuple[_PromptTask, float | None]"](PriorityAdapter(spec, timeout_s), 1)
        self._timeout_s = timeout_s
        self.num_late = 0
        """Prompts that had no number when the deadline came."""

    def start(self, fail: Fail) -> None:
        """Start the process. A function that cannot be loaded comes to ``fail``."""
        self._pool.start(self._on_weight, fail)

    @property
    def num_failed(self) -> int:
        """Prompts on which the function failed."""
        return self._pool.num_failed

    def weigh(self, prompts: Sequence[tuple[Prompt, PromptHistory]]) -> list[float | None]:
        """The weights, in order; returns at the deadline at the latest."""
        weighing = _Weighing(len(prompts))
        until_s = time.monotonic() + self._timeout_s
        for place, (prompt, history) in enumerate(prompts):
            self._pool.submit(_PromptTask(weighing, place, prompt, history))
        if prompts and not weighing.done.wait(max(0.0, until_s - time.monotonic())):
            self.num_late += weighing.num_left
            _LOG.warning(
                "%d of %d prompts have no priority within %g s", weighing.num_left, len(prompts), self._timeout_s
            )
        return list(weighing.values)

    def _on_weight(self, weight: tuple[_PromptTask, float | None]) -> None:
        task, value = weight
        task.weighing.values[task.place] = value
        task.weighing.num_left -= 1
        if not task.weighing.num_left:
            task.weighing.done.set()

    def close(self, timeout_s: float) -> None:
        """Kill the process."""
        self._pool.close(timeout_s)
