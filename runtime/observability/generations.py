"""The stages of a sample at its engine, with the turns and calls of its episode.

Invariants:

* What a sample's ``generate`` holds is recorded as soon as it is over, before ``generate`` itself, under the id that
  this will have. Spans of episodes are written within hundredths of a second: an episode is long, and what a killed
  engine had made of it up to a save point is trained.
* A turn lies within its ``generate``. A call may outlive it: an interruption stops the model, and no tool.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.messages.local import TurnTaken
from penstock.messages.samples import Cancelled, SampleKey
from penstock.runtime.observability.spans import CHAT, COMPLETION, TOOL, attempt_span_id, trace_id_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.actors.settled import KnownSettled
    from penstock.messages.commands import Generate
    from penstock.messages.flow import SampleIssued
    from penstock.messages.local import EpisodeMoved, GenerationEnded, ToolCalled
    from penstock.messages.samples import Outcome, VersionSpan
    from penstock.runtime.observability.spans import Attributes, SpanRecorder
    from penstock.runtime.observability.trace_ids import TraceIds

MAX_OPEN: Final = 65_536
"""Stages of one kind that may be open at once in one actor."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Open(dict[KeyT, ValueT]):
    """What has begun and not ended; the oldest goes when there are too many."""

    __slots__ = ()

    def begin(self, key: KeyT, value: ValueT) -> None:
        """It is the newest from here on, also where it had begun before."""
        num_open = len(self)
        self[key] = value
        if len(self) == num_open:  # rare, and a key that is a sample costs as much to look up as to keep
            del self[key]
            self[key] = value
        elif num_open >= MAX_OPEN:
            del self[next(iter(self))]

    def settle(self, settled: KnownSettled) -> None:
        """The oldest go for as long as they are samples of settled groups: what they have begun ends nowhere. So there
        is no more than what has begun since the oldest that may still end, and each goes once, without a search."""
        while (first := next(iter(self), None)) is not None:
            if not isinstance(first, SampleKey) or first.group_id not in settled:
                return
            del self[first]


class _Generation(msgspec.Struct, gc=False):
    """A generation that runs, or was interrupted."""

    at_ns: int
    trace_id: bytes
    span_id: bytes = b""
    """Of its span, once that or something below it is recorded."""
    num_turns: int = 0
    num_calls: int = 0
    tool_ns: int = 0

    def count(self, step: TurnTaken | ToolCalled) -> None:
        if isinstance(step, TurnTaken):
            self.num_turns += 1
        else:
            self.num_calls += 1
            self.tool_ns += step.end_ns - step.begin_ns

    def told(self) -> Attributes:
        """Of an episode."""
        return ("num_turns", self.num_turns), ("num_calls", self.num_calls), ("tool_s", self.tool_ns / 1e9)


class GenerationStages:
    """Records what an EngineWorker sees of a sample.

    What is heard about a sample comes here where its group is kept, and not otherwise."""

    def __init__(
        self, recorder: SpanRecorder, ids: TraceIds, now_ns: Callable[[], int], arrived: Open[SampleKey | int, int]
    ) -> None:
        """``arrived``: takes the samples that wait for their generation, with since when."""
        self._now_ns = now_ns
        self._record = recorder.record
        self._new_id = recorder.new_id
        self._has_news = recorder.has_news
        self._salt = ids.salt
        self._kept = ids.kept
        self._arrived = arrived
        self._generating: Open[SampleKey, _Generation] = Open()
        self._interrupted: Open[SampleKey, _Generation] = Open()
        """Generations that were interrupted, while their samples are at this engine."""

    def sample_arrived(self, event: SampleIssued) -> None:
        self._arrived.begin(event.key, self._now_ns())

    def begins(self, command: Generate) -> None:
        key, attempt = command.key, command.attempt
        if not self._kept[key.group_id]:
            return
        trace_id, now_ns = trace_id_of(self._salt, key.group_id, key.index), self._now_ns()
        arrived_ns = self._arrived.pop(key, None)
        if arrived_ns is not None:
            parent_id = attempt_span_id(trace_id, attempt)
            self._record(trace_id, parent_id, "queue", arrived_ns, now_ns, (("attempt", attempt),))
        self._generating.begin(key, _Generation(now_ns, trace_id))

    def ended(self, event: GenerationEnded) -> None:
        key = event.key
        begun = self._generating.pop(key, None)
        if begun is None:
            return
        now_ns = self._now_ns()
        outcome = event.outcome
        if self._interrupted:
            self._interrupted.pop(key, None)
        if type(outcome) is Cancelled and outcome.cause == "interrupted":
            self._interrupted.begin(key, begun)
            self._arrived.begin(key, now_ns)
        attributes: Attributes = (
            ("attempt", event.attempt),
            ("outcome", _outcome(type(outcome))),
            ("num_tokens", event.part.num_tokens),
            ("versions", _versions(event.part.spans)),
        )
        if begun.num_turns or begun.num_calls:
            attributes = (*attributes, *begun.told())
        parent_id = attempt_span_id(begun.trace_id, event.attempt)
        trace_id, at_ns = begun.trace_id, begun.at_ns
        begun.span_id = self._record(trace_id, parent_id, "generate", at_ns, now_ns, attributes, span_id=begun.span_id)
        if begun.num_turns:
            self._has_news.set()

    def episode_moved(self, event: EpisodeMoved) -> None:
        step, key = event.step, event.key
        if step is None:
            return
        trace_id = trace_id_of(self._salt, key.group_id, key.index)
        during = self._generating.get(key)
        if during is None or step.begin_ns < during.at_ns:  # a call that has outlived an interruption
            during = self._interrupted.get(key) or during
        if during is not None:
            during.count(step)
            during.span_id = during.span_id or self._new_id()
        parent_id = attempt_span_id(trace_id, event.attempt) if during is None else during.span_id
        name, attributes = _turn(step) if isinstance(step, TurnTaken) else _call(step)
        told: Attributes = (("attempt", event.attempt), *attributes)
        self._record(trace_id, parent_id, name, step.begin_ns, step.end_ns, told)
        self._has_news.set()


@cache
def _outcome(kind: type[Outcome]) -> str:
    return str(kind.__struct_config__.tag)


def _versions(spans: tuple[VersionSpan, ...]) -> str:
    """Version spans as ``3:120 4:12``: 120 tokens of version 3, then 12 of version 4."""
    if len(spans) == 1:  # nearly always, and a list costs as much again
        return f"{spans[0].version}:{spans[0].num_tokens}"
    return " ".join([f"{span.version}:{span.num_tokens}" for span in spans])


def _turn(step: TurnTaken) -> tuple[str, Attributes]:
    return CHAT if step.is_chat else COMPLETION, (
        ("turn", step.number),
        ("conversation", step.conversation),
        ("num_context_tokens", step.num_context_tokens),
        ("num_tokens", sum(span.num_tokens for span in step.spans)),
        ("versions", _versions(step.spans)),
        ("ending", step.ending),
        ("trained", step.is_trained),
        *((("masked", step.masked),) if step.masked else ()),
    )


def _call(step: ToolCalled) -> tuple[str, Attributes]:
    facts = (("after_turn", step.after_turn), ("tool", step.name), ("call_id", step.call_id), ("error", step.error))
    return TOOL + step.name, tuple((name, value) for name, value in facts if value != "")
