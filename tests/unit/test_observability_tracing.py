"""What a watched actor records: handled events, stages of samples, steps and versions, and how they hang together."""

from __future__ import annotations

import sys
from math import nan
from typing import TYPE_CHECKING, Any

import pytest

from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import (
    AnyCommand,
    ApplyWeights,
    FetchWeights,
    Generate,
    PublishWeights,
    SaveCheckpoint,
    Score,
    Send,
    StartTimer,
    Train,
)
from penstock.messages.flow import (
    DemandGranted,
    GrantSpan,
    GroupAdmitted,
    GroupRejected,
    SampleFailed,
    SampleGenerated,
    SampleIssued,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
    SettledState,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EpisodeMoved,
    FetchedPrompt,
    GenerationEnded,
    PromptsFetched,
    SampleJudged,
    TimerFired,
    ToolCalled,
    TurnTaken,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import (
    Cancelled,
    Completed,
    Group,
    Part,
    Prompt,
    Purpose,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    VersionSpan,
)
from penstock.messages.training import BatchReady, CheckpointDemanded, UpdateMode
from penstock.messages.weights import ServingEngine, VersionAnnounced, WeightManifest, WeightsExported
from penstock.messages.wire import Header
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.span_export import SpanExporterThread
from penstock.runtime.observability.span_file import SpanFile, actor_attributes
from penstock.runtime.observability.spans import (
    SpanRecorder,
    attempt_span_id,
    is_traced,
    root_span_id,
    step_trace_id,
    trace_id_of,
)
from penstock.runtime.observability.traces import open_traces, read_spans, read_step, read_trace, span_file
from penstock.runtime.observability.tracing import TraceObserver
from penstock.runtime.observability.trackers import EventLog, event_file, read_run_events

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import NoReturn

    from penstock.messages.base import Event
    from penstock.runtime.observability.spans import SpanTuple
    from penstock.runtime.shell.shell import Observer

SALT = bytes(range(16))
KEY = SampleKey(12, 3)
PROMPT = Prompt(row=0, epoch=0, tokens=pack_tokens([1, 2]))
MANIFEST = WeightManifest(
    version=5, publish=5, learner_epoch=1, transport="disk", location="w", size_bytes=4096, digest="d"
)
SETTLED = SettledState(0, 0, ())


def part(*spans: tuple[int, int]) -> Part:
    num_tokens = sum(tokens for _, tokens in spans)
    return Part(
        tokens=pack_tokens(range(num_tokens)),
        logprobs=pack_floats([-1.0] * num_tokens),
        spans=tuple(VersionSpan(version, tokens) for version, tokens in spans),
    )


def sample(key: SampleKey = KEY, reward: float | None = None) -> Sample:
    outcome = Completed(reward=None if reward is None else Reward(value=reward))
    return Sample(key=key, parts=(part((4, 3)),), outcome=outcome)


def group(group_id: int, num_samples: int) -> Group:
    samples = tuple(sample(SampleKey(group_id, index), 1.0) for index in range(num_samples))
    return Group(group_id=group_id, prompt=PROMPT, samples=samples)


def issued(key: SampleKey = KEY, attempt: int = 0) -> SampleIssued:
    return SampleIssued(
        key=key, attempt=attempt, group_size=8, prompt=PROMPT, seed=1, min_version=4, deadline_version=6
    )


def generate(attempt: int = 0) -> Generate:
    return Generate(key=KEY, attempt=attempt, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)


def batch(version: int, *groups: Group) -> BatchReady:
    return BatchReady(
        version=version, groups=groups, announced_version=version - 1, max_staleness=2, update_mode=UpdateMode.DRAIN
    )


class Actor:
    """The observer of one actor, handed events and commands as a shell hands them over."""

    def __init__(self, name: str, *, fraction: float = 1.0, salt: bytes = SALT) -> None:
        self.name = name
        self.recorder = SpanRecorder()
        self.observer: Observer = TraceObserver(
            self.recorder, run_salt=salt, name=name, epoch=1, fraction=fraction, clock_ns=lambda: 0
        )
        self._peer = TraceObserver(SpanRecorder(), run_salt=salt, name="peer", epoch=1, fraction=fraction)
        self._taken: list[SpanTuple] = []

    @property
    def spans(self) -> list[SpanTuple]:
        """Everything recorded so far."""
        self._taken.extend(self.recorder.take(1000))
        return self._taken

    def hear(self, event: Event, *commands: AnyCommand, at: int = 0, trace: bytes | None = None) -> list[bytes]:
        """Handle an event from ``at`` to ``at + 1``; returns the trace contexts of what it sends, in order.

        ``trace`` is the context that it came with, empty for what a peer says that is watched likewise; None for an
        event of the actor's own process.
        """
        if trace == b"":
            trace = self._peer.handled(TimerFired(key="t"), None, 0, 1, [Send(self.name, event)]).get(id(event), b"")
        header = None if trace is None else Header("peer", 1, 1, 1, 0, trace)
        contexts = self.observer.handled(event, header, at, at + 1, list(commands))
        return [contexts.get(id(command.event), b"") for command in commands if isinstance(command, Send)]

    def stages(self, name: str) -> list[SpanTuple]:
        return [span for span in self.spans if span[3] == name]

    def times(self, name: str) -> list[tuple[int, int]]:
        return [(span[4], span[5]) for span in self.stages(name)]


def attributes(span: SpanTuple) -> dict[str, object]:
    return dict(span[6])


# --- handled events ---------------------------------------------------------------------------------------------


def test_every_handled_event_has_a_span_in_the_trace_of_its_sample() -> None:
    engine = Actor("engine/0")
    engine.hear(issued(), at=5)
    [span] = engine.spans
    trace_id = trace_id_of(SALT, 12, 3)
    assert span[0] == trace_id
    assert span[2:6] == (root_span_id(trace_id), "handle SampleIssued", 5, 6)


def test_the_context_that_travels_makes_what_was_sent_a_child_of_what_sent_it() -> None:
    engine, scorer = Actor("engine/0"), Actor("scorer")
    generated = SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT)
    ended = GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 3)))
    [context] = engine.hear(ended, Send("scorer", generated), at=5)
    assert len(context) == 24
    scorer.hear(generated, at=7, trace=context)
    assert scorer.spans[0][0] == engine.spans[0][0]
    assert scorer.spans[0][2] == engine.spans[0][1]


def test_the_same_event_sent_to_several_has_the_same_parent_for_each() -> None:
    publisher = Actor("weight_publisher")
    announced = VersionAnnounced(version=5, publish=5, serving=(ServingEngine("engine/0", 5),))
    exported = WeightsExported(manifest=MANIFEST, update_mode=UpdateMode.DRAIN)
    contexts = publisher.hear(exported, Send("buffer", announced), Send("prompt_source", announced))
    assert contexts[0] == contexts[1]
    assert contexts[0][16:] == publisher.stages("handle WeightsExported")[0][1]


def test_what_is_sent_about_another_sample_hangs_on_the_root_of_that_sample() -> None:
    source = Actor("prompt_source")
    other = issued(SampleKey(99, 0))
    [context] = source.hear(PromptsFetched(prompts=()), Send("engine/0", other))
    trace_id = trace_id_of(SALT, 99, 0)
    assert context == trace_id + root_span_id(trace_id)


def test_events_about_nothing_in_particular_stand_in_a_trace_of_their_actor() -> None:
    buffer, scorer = Actor("buffer"), Actor("scorer")
    for actor in (buffer, scorer):
        actor.hear(TimerFired(key="t"), StartTimer("t", 1.0))
        actor.hear(SamplesSettled(settled=SETTLED), trace=b"")
    assert {span[0] for span in buffer.spans} != {span[0] for span in scorer.spans}
    assert len({span[0] for span in buffer.spans}) == 1
    assert [span[2:4] for span in buffer.spans] == [(b"", "handle TimerFired"), (b"", "handle SamplesSettled")]


def test_an_event_about_nothing_in_particular_carries_no_context() -> None:
    buffer = Actor("buffer")
    demand = DemandGranted(total=1, spans=(), settled=SETTLED)
    assert buffer.hear(GroupAdmitted(group=group(1, 2)), Send("prompt_source", demand)) == [b""]


def test_a_group_stands_in_the_trace_of_its_first_sample() -> None:
    buffer = Actor("buffer")
    buffer.hear(GroupAdmitted(group=group(7, 4)))
    assert [span[0] for span in buffer.spans] == [trace_id_of(SALT, 7, 0)]


# --- sampling ---------------------------------------------------------------------------------------------------


def test_a_sample_that_is_left_out_records_nothing_and_sends_no_context() -> None:
    engine = Actor("engine/0", fraction=0.0)
    generated = SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT)
    generate = Generate(key=KEY, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)
    engine.hear(issued(), generate, trace=b"")
    ended = GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 3)))
    assert engine.hear(ended, Send("scorer", generated)) == [b""]
    assert engine.spans == []


def test_what_a_sender_has_left_out_is_left_out_and_what_it_keeps_is_kept() -> None:
    source, engine = Actor("prompt_source", fraction=0.3), Actor("engine/0", fraction=0.3)
    kept = set[int]()
    for group_id in range(300):
        key = SampleKey(group_id, 0)
        event = issued(key)
        [context] = source.hear(PromptsFetched(prompts=()), Send("engine/0", event))
        header = Header("prompt_source", 1, 1, 1, 0, context)
        engine.observer.handled(event, header, 1, 2, [])
        ended = GenerationEnded(key=key, attempt=0, outcome=Completed(), part=part((4, 3)))
        engine.hear(ended, at=5)
        kept |= {group_id} if context else set()
    for name in ("handle SampleIssued", "handle GenerationEnded"):
        assert {span[0] for span in engine.stages(name)} == {trace_id_of(SALT, group_id, 0) for group_id in kept}
    assert 60 < len(kept) < 120


def test_all_actors_leave_out_the_same_samples_and_a_like_share_of_everything_else() -> None:
    actors = [Actor("scorer", fraction=0.25), Actor("filter", fraction=0.25)]
    for actor in actors:
        for group_id in range(2000):
            actor.hear(SampleScored(sample=sample(SampleKey(group_id, 0), 1.0), group_size=1, prompt=PROMPT))
        for _ in range(400):
            actor.hear(TimerFired(key="t"))
    kept = [{span[0] for span in actor.stages("handle SampleScored")} for actor in actors]
    assert kept[0] == kept[1]
    assert len(kept[0]) == pytest.approx(500, abs=60)
    assert len(actors[0].stages("handle TimerFired")) == 100


def test_all_samples_of_a_group_are_traced_or_none_and_readers_know_which() -> None:
    engine = Actor("engine/0", fraction=0.3)
    for group_id in range(200):
        for index in (0, 1, 7, 8):  # the last one replaces the first
            engine.hear(issued(SampleKey(group_id, index)), at=1)
    kept = [group_id for group_id in range(200) if is_traced(SALT, group_id, 0.3)]
    assert [span[0] for span in engine.stages("handle SampleIssued")] == [
        trace_id_of(SALT, group_id, index) for group_id in kept for index in (0, 1, 7, 8)
    ]
    assert 40 < len(kept) < 80


def calls_of(act: Callable[[], object]) -> list[str]:
    """Names of the functions written in Python that are called."""
    names: list[str] = []
    sys.setprofile(lambda frame, what, _: names.append(frame.f_code.co_name) if what == "call" else None)
    try:
        act()
    finally:
        sys.setprofile(None)
    return names[1:]


def test_a_group_that_is_left_out_is_decided_on_once_an_actor_and_then_only_looked_up() -> None:
    engine = Actor("engine/0", fraction=0.0)
    without = Header("prompt_source", 1, 1, 1, 0, b"")
    ended = GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 3)))
    sends: list[AnyCommand] = [Send("scorer", SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT))]
    handled = engine.observer.handled
    other = GenerationEnded(key=SampleKey(13, 0), attempt=0, outcome=Completed(), part=part((4, 3)))
    assert calls_of(lambda: handled(ended, None, 1, 2, [])) == ["handled", "__missing__", "_decided", "_derived"]
    assert calls_of(lambda: handled(ended, None, 1, 2, [])) == ["handled"]
    assert calls_of(lambda: handled(issued(other.key), without, 1, 2, [])) == ["issued", "handled"]
    assert calls_of(lambda: handled(other, None, 1, 2, [])) == ["handled"], "its sender has said so"
    assert calls_of(lambda: handled(ended, None, 1, 2, sends)) == ["handled"]
    assert calls_of(lambda: handled(ended, without, 1, 2, [generate()])) == ["generate", "handled", "begins"]
    assert not engine.spans


def test_what_follows_from_a_sample_that_is_left_out_costs_scorer_and_filter_no_look_at_their_commands() -> None:
    scorer = Actor("scorer", fraction=0.0)
    observer = EventObserver(EventLog(), name="scorer", epoch=1, now_s=lambda: 0.0, inner=scorer.observer)
    commands = _Unread([Send("filter", SampleScored(sample=sample(), group_size=4, prompt=PROMPT))])
    header = Header("engine/0", 1, 1, 1, 0)
    generated = SampleGenerated(sample=sample(), group_size=4, prompt=PROMPT)
    assert not observer.handled(generated, header, 1, 2, commands)
    assert not observer.handled(SampleJudged(key=KEY, attempt=0, reward=None), None, 1, 2, commands)
    assert not scorer.recorder.num_pending


class _Unread(list[Any]):
    def __iter__(self) -> NoReturn:
        raise AssertionError("a group that is left out needs no look at what was asked for")


def test_what_is_about_a_step_is_traced_whoever_sent_it() -> None:
    learner = Actor("learner", fraction=0.0)
    learner.observer.handled(CheckpointDemanded(version=5), Header("supervisor", 1, 1, 1, 0, b""), 1, 2, [])
    assert [span[0] for span in learner.spans] == [step_trace_id(SALT, 5)]


# --- stages of a sample -----------------------------------------------------------------------------------------


def test_issue_lasts_from_the_grant_and_is_the_root() -> None:
    source = Actor("prompt_source")
    spans = (GrantSpan(0, 20, 0, 0, 2),)
    source.hear(DemandGranted(total=10, spans=spans, settled=SETTLED), at=100, trace=b"")
    source.hear(DemandGranted(total=20, spans=spans, settled=SETTLED), at=200, trace=b"")
    source.hear(DemandGranted(total=20, spans=spans, settled=SETTLED), at=300, trace=b"")
    source.hear(PromptsFetched(prompts=()), Send("engine/1", issued()), at=400)
    [span] = source.stages("issue")
    trace_id = trace_id_of(SALT, 12, 3)
    assert span[:6] == (trace_id, root_span_id(trace_id), b"", "issue", 200, 401)
    assert attributes(span) == {
        "group_id": 12,
        "index": 3,
        "attempt": 0,
        "engine": "engine/1",
        "min_version": 4,
        "deadline_version": 6,
    }


def test_issue_says_how_long_its_row_was_waited_for() -> None:
    source = Actor("prompt_source")
    source.hear(DemandGranted(total=20, spans=(GrantSpan(0, 20, 0, 0, 2),), settled=SETTLED), at=100, trace=b"")
    source.hear(PromptsFetched(prompts=(FetchedPrompt(12, PROMPT),)), at=250)
    source.hear(TimerFired(key="room"), Send("engine/1", issued()), at=400)
    [span] = source.stages("issue")
    assert span[4:6] == (100, 401)
    assert attributes(span)["row_wait_s"] == 150e-9


def test_a_sample_that_is_issued_again_hangs_below_its_first_issue() -> None:
    source = Actor("prompt_source")
    source.hear(PromptsFetched(prompts=()), Send("engine/0", issued()), at=1)
    source.hear(TimerFired(key="census"), Send("engine/1", issued(attempt=1)), at=9)
    first, again = source.stages("issue")
    assert again[0] == first[0]
    assert again[2] == first[1]
    assert again[4:6] == (9, 10)
    assert attributes(again)["attempt"] == 1
    source.hear(TimerFired(key="census"), Send("engine/0", issued(attempt=2)), at=19)
    (*_, third) = source.stages("issue")
    assert [span[7] for span in (first, again, third)] == [
        (),
        ((first[0], first[1]),),
        ((first[0], again[1]),),
    ], "each is linked to the attempt before it"


def test_queue_and_generate_follow_each_other_and_name_the_versions() -> None:
    engine = Actor("engine/0")
    generate = Generate(key=KEY, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)
    engine.hear(issued(), at=10, trace=b"")
    engine.hear(WeightsSwapped(version=4, publish=4, digest="d"), generate, at=20)
    engine.hear(GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 120), (5, 7))), at=50)
    assert engine.times("queue") == [(10, 21)]
    assert engine.times("generate") == [(21, 50)]
    assert attributes(engine.stages("generate")[0]) == {
        "attempt": 0,
        "outcome": "completed",
        "num_tokens": 127,
        "versions": "4:120 5:7",
    }


def turn(number: int, begin_ns: int, end_ns: int, ending: str = "end_token") -> EpisodeMoved:
    step = TurnTaken(
        number=number, conversation=0, begin_ns=begin_ns, end_ns=end_ns, num_context_tokens=9,
        spans=(VersionSpan(4, 2), VersionSpan(5, 1)), ending=ending, is_chat=True, is_trained=True,
    )  # fmt: skip
    return EpisodeMoved(key=KEY, attempt=1, num_outside=1, step=step)


def call(after_turn: int, begin_ns: int, end_ns: int, error: str = "") -> EpisodeMoved:
    step = ToolCalled(
        after_turn=after_turn, name="look_up", call_id="c7", begin_ns=begin_ns, end_ns=end_ns, error=error
    )
    return EpisodeMoved(key=KEY, attempt=1, num_outside=1, step=step)


def test_turns_and_calls_of_an_episode_stand_below_its_generation_and_that_below_its_attempt() -> None:
    engine = Actor("engine/0")
    engine.hear(issued(attempt=1), generate(1), at=10, trace=b"")
    engine.hear(turn(1, 12, 20), at=21)
    engine.hear(call(1, 22, 30, "ToolError"), at=31)
    engine.hear(EpisodeMoved(key=KEY, attempt=1, num_outside=0), at=32)
    engine.hear(turn(2, 33, 40), at=41)
    assert engine.recorder.has_news.is_set(), "they are written at once"
    engine.hear(GenerationEnded(key=KEY, attempt=1, outcome=Completed(), part=part((4, 5), (5, 2))), at=50)
    (queue,), (whole,) = engine.stages("queue"), engine.stages("generate")
    trace_id = trace_id_of(SALT, 12, 3)
    assert queue[2] == whole[2] == attempt_span_id(trace_id, 1) != root_span_id(trace_id)
    turns, (used,) = engine.stages("chat"), engine.stages("execute_tool look_up")
    assert {span[2] for span in (*turns, used)} == {whole[1]}
    assert [span[4:6] for span in (*turns, used)] == [(12, 20), (33, 40), (22, 30)]
    assert attributes(turns[0]) == {
        "attempt": 1,
        "turn": 1,
        "conversation": 0,
        "num_context_tokens": 9,
        "num_tokens": 3,
        "versions": "4:2 5:1",
        "ending": "end_token",
        "trained": True,
    }
    assert attributes(used) == {
        "attempt": 1, "after_turn": 1, "tool": "look_up", "call_id": "c7", "error": "ToolError"
    }  # fmt: skip
    told = attributes(whole)
    assert (told["num_turns"], told["num_calls"], told["tool_s"]) == (2, 1, 8e-9)


def test_a_call_that_outlives_an_interruption_stays_with_the_generation_that_made_it() -> None:
    engine = Actor("engine/0")
    interrupted = GenerationEnded(key=KEY, attempt=1, outcome=Cancelled(cause="interrupted"), part=part((4, 3)))
    engine.hear(issued(attempt=1), generate(1), at=10, trace=b"")
    engine.hear(turn(1, 12, 20), at=21)
    engine.hear(interrupted, at=25)
    engine.hear(call(1, 22, 28), at=29)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), generate(1), at=40)
    engine.hear(call(1, 23, 45), at=46)
    engine.hear(call(1, 47, 48), at=49)
    engine.hear(GenerationEnded(key=KEY, attempt=1, outcome=Completed(), part=part((4, 5))), at=50)
    first, second = engine.stages("generate")
    assert [span[2] for span in engine.stages("execute_tool look_up")] == [first[1], first[1], second[1]]


def test_an_untraced_episode_records_nothing() -> None:
    engine = Actor("engine/0", fraction=0.0)
    engine.hear(issued(attempt=1), generate(1), at=10, trace=b"")
    engine.hear(turn(1, 12, 20), at=21)
    engine.hear(GenerationEnded(key=KEY, attempt=1, outcome=Completed(), part=part((4, 5))), at=50)
    assert engine.spans == []
    assert not engine.recorder.has_news.is_set()


def test_an_interrupted_generation_queues_again() -> None:
    engine = Actor("engine/0")
    generate = Generate(key=KEY, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)
    engine.hear(issued(), generate, at=10, trace=b"")
    interrupted = Cancelled(cause="interrupted")
    engine.hear(GenerationEnded(key=KEY, attempt=0, outcome=interrupted, part=part((4, 5))), at=20)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), generate, at=30)
    engine.hear(GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 5), (5, 1))), at=40)
    assert engine.times("queue") == [(10, 11), (21, 31)]
    assert engine.times("generate") == [(11, 20), (31, 40)]
    assert [attributes(span)["outcome"] for span in engine.stages("generate")] == ["cancelled", "completed"]


def test_score_lasts_until_the_result_is_sent() -> None:
    scorer = Actor("scorer")
    generated = SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT)
    scorer.hear(generated, Score(sample=sample(), prompt=PROMPT, timeout_s=1.0), at=10, trace=b"")
    scored = SampleScored(sample=sample(reward=0.25), group_size=8, prompt=PROMPT)
    scorer.hear(SampleJudged(key=KEY, attempt=0, reward=Reward(value=0.25)), Send("filter", scored), at=30)
    scorer.hear(generated, at=40, trace=b"")
    failed = ScoringFailed(key=KEY, attempt=0, group_size=8, prompt=PROMPT, reason="timeout", num_tokens=3)
    scorer.hear(SampleJudged(key=KEY, attempt=0, reward=None, reason="timeout"), Send("filter", failed), at=60)
    assert scorer.times("score") == [(10, 31), (40, 61)]
    assert [attributes(span) for span in scorer.stages("score")] == [{"reward": 0.25}, {"failure": "timeout"}]


def test_a_reward_that_is_no_number_is_no_attribute_as_its_file_could_not_hold_it() -> None:
    scorer = Actor("scorer")
    scorer.hear(SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT), at=10)
    judged = SampleJudged(key=KEY, attempt=0, reward=Reward(value=nan))
    scorer.hear(judged, Send("filter", SampleScored(sample=sample(reward=nan), group_size=8, prompt=PROMPT)), at=30)
    assert [attributes(span) for span in scorer.stages("score")] == [{}]


def test_filter_lasts_until_the_group_is_sent_on_and_says_what_became_of_each_sample() -> None:
    gate = Actor("filter")
    admitted = Group(
        group_id=7,
        prompt=PROMPT,
        samples=(sample(SampleKey(7, 0), 1.0),),
        ended=(SampleEnd(key=SampleKey(7, 1), state=TerminalState.FAILED, cause="timeout"),),
    )
    gate.hear(SampleScored(sample=sample(SampleKey(7, 0), 1.0), group_size=2, prompt=PROMPT), at=10, trace=b"")
    failed = ScoringFailed(key=SampleKey(7, 1), attempt=0, group_size=2, prompt=PROMPT, reason="timeout", num_tokens=3)
    gate.hear(failed, Send("buffer", GroupAdmitted(group=admitted)), at=20, trace=b"")
    assert gate.times("filter") == [(10, 21), (20, 21)]
    assert [attributes(span) for span in gate.stages("filter")] == [
        {"kept": True},
        {"kept": False, "cause": "timeout"},
    ]
    end = SampleEnd(key=KEY, state=TerminalState.FILTERED, cause="zero_spread")
    rejected = GroupRejected(group_id=12, cause="zero_spread", ended=(end,))
    gate.hear(SampleScored(sample=sample(), group_size=1, prompt=PROMPT), Send("buffer", rejected), at=30, trace=b"")
    assert attributes(gate.stages("filter")[2]) == {"kept": False, "cause": "zero_spread"}


def test_a_failed_sample_that_never_came_to_the_filter_has_no_filter_span() -> None:
    gate = Actor("filter")
    end = SampleEnd(key=KEY, state=TerminalState.FAILED, cause="retries")
    failed = SampleFailed(key=KEY, attempt=2, group_size=1, prompt=PROMPT, reason="retries")
    rejected = GroupRejected(group_id=12, cause="failed", ended=(end,))
    gate.hear(failed, Send("buffer", rejected), at=30, trace=b"")
    assert [span[3] for span in gate.spans] == ["handle SampleFailed"]


def test_a_batch_that_is_offered_again_ends_the_buffer_wait_once() -> None:
    buffer = Actor("buffer")
    buffer.hear(GroupAdmitted(group=group(7, 2)), at=10, trace=b"")
    buffer.hear(TimerFired(key="x"), Send("learner", batch(5, group(7, 2))), at=50)
    buffer.hear(TimerFired(key="x"), Send("learner", batch(5, group(7, 2))), at=90)
    assert buffer.times("buffer_wait") == [(10, 51), (10, 51)]
    step = step_trace_id(SALT, 5)
    assert {span[7] for span in buffer.stages("buffer_wait")} == {((step, root_span_id(step)),)}


# --- steps and versions -----------------------------------------------------------------------------------------


def test_a_step_is_linked_to_its_samples_and_to_its_version_and_they_to_it(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    learner, engine = Actor("learner", salt=salt), Actor("engine/0", salt=salt)
    publisher = Actor("weight_publisher", salt=salt)
    groups = (group(1, 2), group(2, 2))
    learner.hear(batch(5, *groups), Train(version=5, groups=groups, min_token_version=0), at=10, trace=b"")
    publish, save = PublishWeights(version=5, publish=5), SaveCheckpoint(version=5)
    trained = BatchTrained(version=5, num_trained_tokens=12, num_masked_tokens=1, metrics=())
    learner.hear(trained, publish, save, at=30)
    learner.hear(WeightsPublished(manifest=MANIFEST), at=40)
    learner.hear(CheckpointWritten(version=5, path="c"), at=45)
    publisher.hear(WeightsExported(manifest=MANIFEST, update_mode=UpdateMode.DRAIN), at=50, trace=b"")
    engine.hear(TimerFired(key="x"), FetchWeights(manifest=MANIFEST), at=52)
    engine.hear(WeightsStagedLocally(version=5, publish=5, digest="d"), ApplyWeights(MANIFEST, UpdateMode.DRAIN), at=60)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), at=70)
    announced = VersionAnnounced(version=5, publish=5, serving=(ServingEngine("engine/0", 5),))
    for _ in range(2):
        publisher.hear(TimerFired(key="x"), Send("buffer", announced), at=80)
    for actor in (learner, engine, publisher):
        write(tmp_path, actor.name, actor.recorder)

    rows = {row.name: row for row in read_step(tmp_path, 5) if not row.name.startswith("handle ")}
    assert {name: (row.start_ns, row.end_ns) for name, row in rows.items()} == {
        "step": (11, 30),
        "publish": (31, 40),
        "checkpoint": (31, 45),
        "version": (50, 81),
        "fetch_weights": (53, 60),
        "apply_weights": (61, 70),
    }
    assert rows["step"].attributes == {
        "version": 5,
        "num_samples": 4,
        "num_trained_tokens": 12,
        "num_masked_tokens": 1,
    }
    step = (rows["step"].trace_id, rows["step"].span_id)
    version = (rows["version"].trace_id, rows["version"].span_id)
    sample_roots = {
        (trace.hex(), root_span_id(trace).hex()) for g in (1, 2) for i in (0, 1) for trace in [trace_id_of(salt, g, i)]
    }
    assert set(rows["step"].links) == {version, *sample_roots}
    assert rows["version"].links == (step,)
    assert rows["publish"].parent_id == rows["apply_weights"].parent_id == rows["version"].span_id
    [train] = [row for row in read_trace(tmp_path, 2, 1) if row.name == "train"]
    assert (train.start_ns, train.end_ns, train.links) == (11, 30, (step,))


def write(run_folder: Path, actor: str, recorder: SpanRecorder) -> None:
    exporter = SpanExporterThread(recorder, SpanFile(span_file(run_folder, actor, 1), actor_attributes(actor, 1)))
    exporter.start()
    assert exporter.close(5)


def test_the_life_of_a_sample_is_one_trace_over_all_actors(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    names = ("prompt_source", "engine/0", "scorer", "filter", "buffer", "learner")
    actors = {name: Actor(name, salt=salt) for name in names}
    one = Group(group_id=12, prompt=PROMPT, samples=(sample(reward=1.0),))
    generate = Generate(key=KEY, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)
    generated = SampleGenerated(sample=sample(), group_size=1, prompt=PROMPT)
    scored = SampleScored(sample=sample(reward=1.0), group_size=1, prompt=PROMPT)
    admitted = GroupAdmitted(group=one)
    [trace] = actors["prompt_source"].hear(PromptsFetched(prompts=()), Send("engine/0", issued()), at=0)
    actors["engine/0"].hear(issued(), generate, at=10, trace=trace)
    ended = GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 3)))
    [trace] = actors["engine/0"].hear(ended, Send("scorer", generated), at=20)
    actors["scorer"].hear(generated, at=30, trace=trace)
    judged = SampleJudged(key=KEY, attempt=0, reward=Reward(value=1.0))
    [trace] = actors["scorer"].hear(judged, Send("filter", scored), at=40)
    [trace] = actors["filter"].hear(scored, Send("buffer", admitted), at=50, trace=trace)
    actors["buffer"].hear(admitted, at=60, trace=trace)
    [trace] = actors["buffer"].hear(TimerFired(key="x"), Send("learner", batch(5, one)), at=70)
    actors["learner"].hear(batch(5, one), Train(version=5, groups=(one,), min_token_version=0), at=80, trace=trace)
    trained = BatchTrained(version=5, num_trained_tokens=3, num_masked_tokens=0, metrics=())
    actors["learner"].hear(trained, at=90)
    for name, actor in actors.items():
        write(tmp_path, name, actor.recorder)

    rows = read_trace(tmp_path, 12, 3)
    stages = [row for row in rows if not row.name.startswith("handle ")]
    assert [(row.actor, row.name) for row in stages] == [
        ("prompt_source", "issue"),
        ("engine/0", "queue"),
        ("engine/0", "generate"),
        ("scorer", "score"),
        ("filter", "filter"),
        ("buffer", "buffer_wait"),
        ("learner", "train"),
    ]
    [root] = [row for row in rows if not row.parent_id]
    assert root.name == "issue"
    known = {row.span_id for row in rows}
    assert all(row.parent_id in known for row in rows if row is not root)
    assert [row.start_ns for row in rows] == sorted(row.start_ns for row in rows)
    assert {row.trace_id for row in rows} == {trace_id_of(salt, 12, 3).hex()}
    assert read_spans(tmp_path, trace_id_of(salt, 12, 4)) == []


# --- the event log ----------------------------------------------------------------------------------------------


def test_an_actor_logs_what_it_handles_and_is_traced_beside_it(tmp_path: Path) -> None:
    actor = Actor("engine/0")
    log = EventLog(event_file(tmp_path, "engine/0", 2))
    times = iter([0.5, 1.25, 2.0, 2.5])
    observer = EventObserver(log, name="engine/0", epoch=2, now_s=lambda: next(times), inner=actor.observer)
    observer.handled(issued(), None, 1, 2, [])
    observer.handled(TimerFired(key="t"), None, 3, 4, [])
    observer.handled(WeightsSwapped(version=4, publish=4, digest="d"), None, 5, 6, [])
    assert actor.recorder.num_pending == 3
    sent = issued()
    contexts = observer.handled(TimerFired(key="t"), None, 7, 8, [Send("engine/0", sent)])
    assert contexts[id(sent)][:16] == trace_id_of(SALT, 12, 3)
    log.close()
    assert [(row.at_s, row.actor, row.epoch, row.event, row.summary) for row in read_run_events(tmp_path)] == [
        (0.5, "engine/0", 2, "SampleIssued", "12/3"),
        (1.25, "engine/0", 2, "TimerFired", ""),
        (2.0, "engine/0", 2, "WeightsSwapped", "version 4"),
        (2.5, "engine/0", 2, "TimerFired", ""),
    ]


def test_an_event_log_works_without_traces() -> None:
    log = EventLog()
    observer = EventObserver(log, name="scorer", epoch=1, now_s=lambda: 0.0)
    sends = [Send("engine/0", issued())]
    assert not observer.handled(TimerFired(key="t"), None, observer.clock_ns(), observer.clock_ns(), [*sends])
    log.flush()
    assert log.num_events == 1
