"""What a watched actor records: stages of samples, steps and versions, and how they hang together; the event log."""

from __future__ import annotations

import gc
import sys
from itertools import count, repeat
from math import nan
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import (
    AnyCommand,
    ApplyWeights,
    FetchWeights,
    Generate,
    PublishWeights,
    Record,
    SaveCheckpoint,
    Score,
    Send,
    Train,
)
from penstock.messages.errors import UserFault
from penstock.messages.evaluation import EvaluationDue
from penstock.messages.flow import (
    DemandGranted,
    GrantSpan,
    GroupAdmitted,
    GroupRejected,
    SampleFailed,
    SampleGenerated,
    SampleIssued,
    SampleScored,
    ScoringFailed,
    SettledState,
)
from penstock.messages.ledger import GroupClosed
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
    WeightsCopied,
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
from penstock.messages.training import BatchReady, UpdateMode
from penstock.messages.weights import VersionAnnounced, WeightManifest, WeightsExported, WeightsStaged
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.group_spans import SAMPLES, record_together, unpacked
from penstock.runtime.observability.span_export import SpanExporterThread
from penstock.runtime.observability.span_file import SpanFile, actor_attributes
from penstock.runtime.observability.spans import (
    SpanRecorder,
    attempt_span_id,
    decoded_span,
    is_traced,
    root_span_id,
    step_trace_id,
    trace_id_of,
)
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.subjects import version_subject
from penstock.runtime.observability.trace_ids import TraceIds
from penstock.runtime.observability.traces import (
    each_span,
    open_traces,
    read_spans,
    read_step,
    read_trace,
    span_file,
    write_otlp,
)
from penstock.runtime.observability.trackers import EventLog, event_file, read_events_about, read_run_events

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.messages.base import Event
    from penstock.runtime.observability.spans import SpanTuple

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
    """What watches one actor, handed events and commands as a shell hands them over."""

    def __init__(self, name: str, *, fraction: float = 1.0, salt: bytes = SALT, log: EventLog | None = None) -> None:
        self.name = name
        self.recorder = SpanRecorder()
        self.clock = count()
        stages = self.stage_recorder = StageRecorder(self.recorder, TraceIds(salt, fraction), lambda: next(self.clock))
        now_s = lambda: next(self.clock) / 1e9  # noqa: E731
        self.observer = EventObserver(log or EventLog(), name=name, epoch=2, now_s=now_s, stages=stages)
        self._taken: list[SpanTuple] = []

    @property
    def spans(self) -> list[SpanTuple]:
        """Everything recorded so far."""
        self._taken.extend(each for span in self.recorder.take(1000) for each in unpacked(decoded_span(span)))
        return self._taken

    def hear(self, event: Event, *commands: AnyCommand, at: int = 0) -> None:
        """Handle an event: it is logged at ``at``, and what is recorded of it comes a nanosecond later each."""
        self.clock = count(at)
        self.observer.handled(event, None, list(commands))

    def stages(self, name: str) -> list[SpanTuple]:
        return [span for span in self.spans if span[3] == name]

    def times(self, name: str) -> list[tuple[int, int]]:
        return [(span[4], span[5]) for span in self.stages(name)]


def attributes(span: SpanTuple) -> dict[str, object]:
    return dict(span[6])


# --- sampling ---------------------------------------------------------------------------------------------------


def hear_a_life(actors: dict[str, Actor], group_id: int) -> None:
    """A group of two samples through the actors, as far as each of them records stages of it."""
    one = group(group_id, 2)
    sends = [Send("engine/0", issued(each.key)) for each in one.samples]
    actors["prompt_source"].hear(PromptsFetched(prompts=()), *sends, at=1)
    for each in one.samples:
        begins = Generate(key=each.key, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)
        actors["engine/0"].hear(issued(each.key), begins, at=2)
        ended = GenerationEnded(key=each.key, attempt=0, outcome=Completed(), part=part((4, 3)))
        generated = SampleGenerated(sample=each, group_size=2, prompt=PROMPT)
        actors["engine/0"].hear(ended, Send("scorer", generated), at=3)
        actors["scorer"].hear(generated, at=4)
        scored = SampleScored(sample=each, group_size=2, prompt=PROMPT)
        actors["scorer"].hear(SampleJudged(key=each.key, attempt=0, reward=None), Send("filter", scored), at=5)
        actors["filter"].hear(scored, at=6)
    actors["filter"].hear(TimerFired(key="t"), Send("buffer", GroupAdmitted(group=one)), at=7)
    actors["buffer"].hear(GroupAdmitted(group=one), at=8)
    actors["buffer"].hear(TimerFired(key="t"), Send("learner", batch(group_id, one)), at=9)
    train = Train(version=group_id, groups=(one,), min_token_version=0)
    actors["learner"].hear(batch(group_id, one), train, at=10)
    trained = BatchTrained(version=group_id, num_trained_tokens=1, num_masked_tokens=0, metrics=())
    actors["learner"].hear(trained, at=11)


ACTORS = ("prompt_source", "engine/0", "scorer", "filter", "buffer", "learner")


def test_all_actors_trace_all_samples_of_a_group_or_none_and_readers_know_which() -> None:
    actors = {name: Actor(name, fraction=0.3) for name in ACTORS}
    for group_id in range(100):
        hear_a_life(actors, group_id)
    kept = [group_id for group_id in range(100) if is_traced(SALT, group_id, 0.3)]
    traces = [trace_id_of(SALT, group_id, index) for group_id in kept for index in (0, 1)]
    for name, actor in actors.items():
        of_samples = [span for span in actor.spans if span[3] != "step"]
        stages = {span[3] for span in of_samples}
        assert len(stages) == (2 if name == "engine/0" else 1)
        for stage in stages:
            assert [span[0] for span in of_samples if span[3] == stage] == traces, stage


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.7, 1.0])
def test_groups_that_follow_each_other_are_kept_evenly(fraction: float) -> None:
    kept = [is_traced(SALT, group_id, fraction) for group_id in range(-1000, 1000)]
    for first in range(0, 1900, 100):
        assert abs(sum(kept[first : first + 100]) - 100 * fraction) <= 4 * (0 < fraction < 1)


def test_the_second_half_of_a_trace_id_is_the_groups_as_samplers_read_it() -> None:
    assert len({trace_id_of(SALT, group_id, index) for group_id in range(300) for index in range(30)}) == 9000
    for group_id in range(300):
        (half,) = {trace_id_of(SALT, group_id, index)[8:] for index in range(30)}
        assert is_traced(SALT, group_id, 0.4) == (int.from_bytes(half, "big") < 0.4 * 2**64)


def calls_of(act: Callable[[], object]) -> list[str]:
    """Names of the functions written in Python that are called, but for those of collections (pytest has callbacks)."""
    names: list[str] = []
    gc.disable()
    sys.setprofile(lambda frame, what, _: names.append(frame.f_code.co_name) if what == "call" else None)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names[1:]


def test_a_group_that_is_left_out_is_decided_on_once_an_actor_and_reads_no_clock() -> None:
    observer = EventObserver(
        EventLog(), name="scorer", epoch=1, now_s=repeat(0.0).__next__,
        stages=StageRecorder(SpanRecorder(), TraceIds(SALT, 0.0), lambda: pytest.fail("the clock was read")),
    )  # fmt: skip
    generated = SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT)
    scored = Send("filter", SampleScored(sample=sample(), group_size=8, prompt=PROMPT))
    judged = SampleJudged(key=KEY, attempt=0, reward=None)
    log = ["handled", "append"]
    first = calls_of(lambda: observer.handled(generated, None, []))
    assert first[:4] == [*log, "__missing__", "traced_among"]
    assert calls_of(lambda: observer.handled(generated, None, [])) == log
    assert calls_of(lambda: observer.handled(judged, None, [scored])) == log


def test_what_an_engine_begins_after_an_event_of_another_group_is_recorded() -> None:
    engine = Actor("engine/0", fraction=0.3)
    kept = next(group_id for group_id in range(100) if is_traced(SALT, group_id, 0.3))
    left_out = next(group_id for group_id in range(100) if not is_traced(SALT, group_id, 0.3))
    begins = Generate(
        key=SampleKey(kept, 0), attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6
    )
    ended = GenerationEnded(key=SampleKey(left_out, 0), attempt=0, outcome=Completed(), part=part((4, 3)))
    engine.hear(issued(begins.key), at=10)
    engine.hear(ended, begins, at=20)
    assert engine.times("queue") == [(11, 21)]
    engine.hear(WeightsStaged(manifest=MANIFEST), FetchWeights(manifest=MANIFEST), at=30)
    engine.hear(WeightsStagedLocally(version=5, publish=5, digest="d"), at=40)
    engine.hear(ended, ApplyWeights(MANIFEST, UpdateMode.DRAIN), at=50)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), at=60)
    assert engine.times("apply_weights") == [(51, 61)]
    look_at = [Send("scorer", SampleGenerated(sample=sample(SampleKey(left_out, 0)), group_size=8, prompt=PROMPT))]
    assert calls_of(lambda: engine.observer.handled(ended, None, [*look_at, begins]))[-1] == "append"


# --- what is recorded of several samples at once ----------------------------------------------------------------


def test_one_record_of_several_samples_is_a_span_of_each_for_every_reader(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    recorder, link = SpanRecorder(), (bytes(range(16, 32)), bytes(range(8)))
    first = trace_id_of(salt, 7, 0)
    record_together(recorder, first, "filter", [(1, 50), (2, 40), (11, 40)], 60, (("kept", True),), (link,))
    record_together(recorder, first, "filter", [], 60, ())
    other = recorder.record(trace_id_of(salt, 8, 2), root_span_id(trace_id_of(salt, 8, 2)), "filter", 1, 2)
    assert recorder.num_pending == 2
    write(tmp_path, "filter", recorder)
    ids = {other.hex()}
    for index, start_ns in ((1, 50), (2, 40), (11, 40)):
        trace_id = trace_id_of(salt, 7, index)
        (row,) = read_spans(tmp_path, trace_id)
        assert (row.actor, row.name, row.start_ns, row.end_ns) == ("filter", "filter", start_ns, 60)
        assert (row.trace_id, row.parent_id) == (trace_id.hex(), root_span_id(trace_id).hex())
        assert row.attributes == {"kept": True}
        assert row.links == ((link[0].hex(), link[1].hex()),)
        ids.add(row.span_id)
    assert len(ids) == 4
    assert read_spans(tmp_path, first) == [], "the group's sample 0 is none of them"
    assert len(list(each_span(tmp_path))) == 4
    write_otlp(tmp_path, tmp_path / "spans.jsonl")
    written = (tmp_path / "spans.jsonl").read_text()
    assert SAMPLES not in written
    assert written.count('"spanId"') == 4 + 3, "three have a link"


def test_a_record_that_names_no_samples_is_damage_and_told_with_its_line(tmp_path: Path) -> None:
    open_traces(tmp_path)
    recorder = SpanRecorder()
    recorder.record(bytes(16), bytes(8), "filter", 1, 2, ((SAMPLES, "1 two"),))
    write(tmp_path, "filter", recorder)
    with pytest.raises(UserFault, match=r"filter-1\.jsonl, line 1: "):
        list(each_span(tmp_path))


# --- stages of a sample -----------------------------------------------------------------------------------------


def test_issue_lasts_from_the_grant_and_is_the_root() -> None:
    source = Actor("prompt_source")
    spans = (GrantSpan(0, 20, 0, 0, 2),)
    source.hear(DemandGranted(total=10, spans=spans, settled=SETTLED), at=100)
    source.hear(DemandGranted(total=20, spans=spans, settled=SETTLED), at=200)
    source.hear(DemandGranted(total=20, spans=spans, settled=SETTLED), at=300)
    source.hear(PromptsFetched(prompts=()), Send("engine/1", issued()), at=400)
    [span] = source.stages("issue")
    trace_id = trace_id_of(SALT, 12, 3)
    assert span[:6] == (trace_id, root_span_id(trace_id), b"", "issue", 201, 401)
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
    source.hear(DemandGranted(total=20, spans=(GrantSpan(0, 20, 0, 0, 2),), settled=SETTLED), at=100)
    source.hear(PromptsFetched(prompts=(FetchedPrompt(12, PROMPT),)), at=250)
    source.hear(TimerFired(key="room"), Send("engine/1", issued()), at=400)
    [span] = source.stages("issue")
    assert span[4:6] == (101, 401)
    assert attributes(span)["row_wait_s"] == 150e-9


def held_by(stages: object) -> dict[str, int]:
    """How many entries each collection of what a recorder of stages holds open has; its plans, and which groups it has
    decided on, are bounded by themselves."""
    beside = ("kept", "on_command", "on_sent", "_on_event")
    held = {name: len(cast("Any", each)) for name, each in vars(stages).items() if isinstance(each, dict | list)}
    return {name: num for name, num in held.items() if num and name not in beside}


def test_when_rows_came_is_forgotten_with_the_settlement_of_their_groups() -> None:
    source, held = Actor("prompt_source"), list[dict[str, int]]()
    for floor in range(0, 4000, 8):
        prompts = tuple(FetchedPrompt(group_id, PROMPT) for group_id in range(floor, floor + 8))
        source.hear(PromptsFetched(prompts=prompts), Send("engine/0", issued(SampleKey(floor, 0))))
        late = PromptsFetched(prompts=(FetchedPrompt(floor - 1, PROMPT),) if floor else ())  # settled meanwhile
        settled = SettledState(floor + 1, floor + 6, (floor + 7,))
        source.hear(DemandGranted(total=floor + 16, spans=(), settled=settled))
        source.hear(late)
        held.append(held_by(source.stage_recorder))
    assert held[-1] == held[1], "as much as when the second groups were settled"
    assert held[-1]["_fetched"] == 1
    evaluation = EvaluationDue(evaluation=None, settled=SettledState(9000, 4000, (), 3))
    source.hear(PromptsFetched(prompts=(FetchedPrompt(~2, PROMPT), FetchedPrompt(~3, PROMPT))))
    source.hear(evaluation)
    assert held_by(source.stage_recorder)["_fetched"] == 1, "of the one that is open"


def test_a_sample_that_is_issued_again_hangs_below_its_first_issue() -> None:
    source = Actor("prompt_source")
    source.hear(PromptsFetched(prompts=()), Send("engine/0", issued()), at=1)
    source.hear(TimerFired(key="census"), Send("engine/1", issued(attempt=1)), at=9)
    first, again = source.stages("issue")
    assert again[0] == first[0]
    assert again[2] == first[1]
    assert again[4:6] == (10, 10)
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
    engine.hear(issued(), at=10)
    engine.hear(WeightsSwapped(version=4, publish=4, digest="d"), generate, at=20)
    engine.hear(GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 120), (5, 7))), at=50)
    assert engine.times("queue") == [(11, 21)]
    assert engine.times("generate") == [(21, 51)]
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
    engine.hear(issued(attempt=1), generate(1), at=10)
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
    engine.hear(issued(attempt=1), generate(1), at=10)
    engine.hear(turn(1, 12, 20), at=21)
    engine.hear(interrupted, at=25)
    engine.hear(call(1, 22, 28), at=29)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), generate(1), at=40)
    engine.hear(call(1, 23, 45), at=46)
    engine.hear(call(1, 47, 48), at=49)
    engine.hear(GenerationEnded(key=KEY, attempt=1, outcome=Completed(), part=part((4, 5))), at=50)
    first, second = engine.stages("generate")
    assert [span[2] for span in engine.stages("execute_tool look_up")] == [first[1], first[1], second[1]]


def test_a_call_is_below_its_generation_where_that_was_over_before_anything_else_was_recorded_below() -> None:
    engine = Actor("engine/0")
    interrupted = GenerationEnded(key=KEY, attempt=0, outcome=Cancelled(cause="interrupted"), part=part((4, 3)))
    engine.hear(issued(), generate(), at=10)
    engine.hear(interrupted, at=25)
    engine.hear(call(1, 22, 28), at=29)
    (generation,), (tool,) = engine.stages("generate"), engine.stages("execute_tool look_up")
    assert tool[2] == generation[1]


def test_an_untraced_episode_records_nothing() -> None:
    engine = Actor("engine/0", fraction=0.0)
    engine.hear(issued(attempt=1), generate(1), at=10)
    engine.hear(turn(1, 12, 20), at=21)
    engine.hear(GenerationEnded(key=KEY, attempt=1, outcome=Completed(), part=part((4, 5))), at=50)
    assert engine.spans == []
    assert not engine.recorder.has_news.is_set()


def test_an_interrupted_generation_queues_again() -> None:
    engine = Actor("engine/0")
    generate = Generate(key=KEY, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=6)
    engine.hear(issued(), generate, at=10)
    interrupted = Cancelled(cause="interrupted")
    engine.hear(GenerationEnded(key=KEY, attempt=0, outcome=interrupted, part=part((4, 5))), at=20)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), generate, at=30)
    engine.hear(GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 5), (5, 1))), at=40)
    assert engine.times("queue") == [(11, 12), (21, 31)]
    assert engine.times("generate") == [(12, 21), (31, 41)]
    assert [attributes(span)["outcome"] for span in engine.stages("generate")] == ["cancelled", "completed"]


def test_score_lasts_until_the_result_is_sent() -> None:
    scorer = Actor("scorer")
    generated = SampleGenerated(sample=sample(), group_size=8, prompt=PROMPT)
    scorer.hear(generated, Score(sample=sample(), prompt=PROMPT, timeout_s=1.0), at=10)
    scored = SampleScored(sample=sample(reward=0.25), group_size=8, prompt=PROMPT)
    scorer.hear(SampleJudged(key=KEY, attempt=0, reward=Reward(value=0.25)), Send("filter", scored), at=30)
    scorer.hear(generated, at=40)
    failed = ScoringFailed(key=KEY, attempt=0, group_size=8, prompt=PROMPT, reason="timeout", num_tokens=3)
    scorer.hear(SampleJudged(key=KEY, attempt=0, reward=None, reason="timeout"), Send("filter", failed), at=60)
    assert scorer.times("score") == [(11, 31), (41, 61)]
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
    gate.hear(SampleScored(sample=sample(SampleKey(7, 0), 1.0), group_size=2, prompt=PROMPT), at=10)
    failed = ScoringFailed(key=SampleKey(7, 1), attempt=0, group_size=2, prompt=PROMPT, reason="timeout", num_tokens=3)
    gate.hear(failed, Send("buffer", GroupAdmitted(group=admitted)), at=20)
    assert gate.times("filter") == [(11, 22), (21, 23)]
    assert [attributes(span) for span in gate.stages("filter")] == [
        {"kept": True},
        {"kept": False, "cause": "timeout"},
    ]
    end = SampleEnd(key=KEY, state=TerminalState.FILTERED, cause="zero_spread")
    rejected = GroupRejected(group_id=12, cause="zero_spread", ended=(end,))
    gate.hear(SampleScored(sample=sample(), group_size=1, prompt=PROMPT), Send("buffer", rejected), at=30)
    assert attributes(gate.stages("filter")[2]) == {"kept": False, "cause": "zero_spread"}


def test_a_failed_sample_that_never_came_to_the_filter_has_no_filter_span() -> None:
    gate = Actor("filter")
    end = SampleEnd(key=KEY, state=TerminalState.FAILED, cause="retries")
    failed = SampleFailed(key=KEY, attempt=2, group_size=1, prompt=PROMPT, reason="retries")
    rejected = GroupRejected(group_id=12, cause="failed", ended=(end,))
    gate.hear(failed, Send("buffer", rejected), at=30)
    assert gate.spans == []


def test_a_batch_that_is_offered_again_ends_the_buffer_wait_once() -> None:
    buffer = Actor("buffer")
    buffer.hear(GroupAdmitted(group=group(7, 2)), at=10)
    buffer.hear(TimerFired(key="x"), Send("learner", batch(5, group(7, 2))), at=50)
    buffer.hear(TimerFired(key="x"), Send("learner", batch(5, group(7, 2))), at=90)
    assert buffer.times("buffer_wait") == [(11, 51), (11, 51)]
    step = step_trace_id(SALT, 5)
    assert {span[7] for span in buffer.stages("buffer_wait")} == {((step, root_span_id(step)),)}


def test_a_group_that_is_given_up_waits_for_no_batch() -> None:
    buffer = Actor("buffer")
    buffer.hear(GroupAdmitted(group=group(7, 2)))
    buffer.hear(TimerFired(key="x"), Record((GroupClosed(group_id=7, ended=()),)))
    assert held_by(buffer.stage_recorder) == {}


# --- steps and versions -----------------------------------------------------------------------------------------


def test_a_publish_ends_for_the_learner_when_the_weights_are_copied(tmp_path: Path) -> None:
    learner = Actor("learner", salt=open_traces(tmp_path))
    learner.hear(TimerFired(key="x"), PublishWeights(version=5, publish=5), at=10)
    learner.hear(WeightsCopied(version=5, size_bytes=8), at=20)
    learner.hear(WeightsPublished(manifest=MANIFEST), at=40)
    write(tmp_path, learner.name, learner.recorder)
    rows = {row.name: row for row in read_step(tmp_path, 5)}
    assert {name: (row.start_ns, row.end_ns) for name, row in rows.items()} == {"publish": (11, 21), "digest": (22, 41)}
    assert rows["publish"].attributes == {"version": 5, "size_bytes": 8}
    assert rows["digest"].attributes == {"version": 5, "size_bytes": MANIFEST.size_bytes}


def test_a_step_is_linked_to_its_samples_and_to_its_version_and_they_to_it(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    learner, engine = Actor("learner", salt=salt), Actor("engine/0", salt=salt)
    publisher = Actor("weight_publisher", salt=salt)
    groups = (group(1, 2), group(2, 2))
    learner.hear(batch(5, *groups), Train(version=5, groups=groups, min_token_version=0), at=10)
    publish, save = PublishWeights(version=5, publish=5), SaveCheckpoint(version=5)
    trained = BatchTrained(version=5, num_trained_tokens=12, num_masked_tokens=1, metrics=())
    learner.hear(trained, publish, save, at=30)
    learner.hear(WeightsPublished(manifest=MANIFEST), at=40)
    learner.hear(CheckpointWritten(version=5, path="c"), at=45)
    publisher.hear(WeightsExported(manifest=MANIFEST, update_mode=UpdateMode.DRAIN), at=50)
    engine.hear(TimerFired(key="x"), FetchWeights(manifest=MANIFEST), at=52)
    engine.hear(WeightsStagedLocally(version=5, publish=5, digest="d"), ApplyWeights(MANIFEST, UpdateMode.DRAIN), at=60)
    engine.hear(WeightsSwapped(version=5, publish=5, digest="d"), at=70)
    announced = VersionAnnounced(version=5, publish=5)
    for _ in range(2):
        publisher.hear(TimerFired(key="x"), Send("buffer", announced), at=80)
    for actor in (learner, engine, publisher):
        write(tmp_path, actor.name, actor.recorder)

    rows = {row.name: row for row in read_step(tmp_path, 5)}
    assert {name: (row.start_ns, row.end_ns) for name, row in rows.items()} == {
        "step": (11, 31),
        "publish": (32, 41),
        "checkpoint": (33, 46),
        "version": (51, 81),
        "fetch_weights": (53, 61),
        "apply_weights": (62, 71),
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
    assert (train.start_ns, train.end_ns, train.links) == (11, 31, (step,))


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
    actors["prompt_source"].hear(PromptsFetched(prompts=()), Send("engine/0", issued()), at=0)
    actors["engine/0"].hear(issued(), generate, at=10)
    ended = GenerationEnded(key=KEY, attempt=0, outcome=Completed(), part=part((4, 3)))
    actors["engine/0"].hear(ended, Send("scorer", generated), at=20)
    actors["scorer"].hear(generated, at=30)
    judged = SampleJudged(key=KEY, attempt=0, reward=Reward(value=1.0))
    actors["scorer"].hear(judged, Send("filter", scored), at=40)
    actors["filter"].hear(scored, Send("buffer", admitted), at=50)
    actors["buffer"].hear(admitted, at=60)
    actors["buffer"].hear(TimerFired(key="x"), Send("learner", batch(5, one)), at=70)
    actors["learner"].hear(batch(5, one), Train(version=5, groups=(one,), min_token_version=0), at=80)
    trained = BatchTrained(version=5, num_trained_tokens=3, num_masked_tokens=0, metrics=())
    actors["learner"].hear(trained, at=90)
    for name, actor in actors.items():
        write(tmp_path, name, actor.recorder)

    rows = read_trace(tmp_path, 12, 3)
    assert [(row.actor, row.name) for row in rows] == [
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


def test_an_actor_logs_what_it_handles_and_a_reader_finds_what_was_about_a_sample(tmp_path: Path) -> None:
    log = EventLog(event_file(tmp_path, "engine/0", 2))
    actor = Actor("engine/0", log=log)
    actor.hear(issued(), generate(), at=500_000_000)
    actor.hear(TimerFired(key="t"), at=1_250_000_000)
    actor.hear(WeightsSwapped(version=4, publish=4, digest="d"), at=2_000_000_000)
    actor.hear(GroupAdmitted(group=group(12, 4)), at=2_500_000_000)
    log.close()
    assert [span[3] for span in actor.spans] == ["queue"]
    rows = [(0.5, "engine/0", 2, "SampleIssued", "12/3"), (1.25, "engine/0", 2, "TimerFired", "")]
    rows += [(2.0, "engine/0", 2, "WeightsSwapped", "version 4"), (2.5, "engine/0", 2, "GroupAdmitted", "12")]
    assert [(row.at_s, row.actor, row.epoch, row.event, row.summary) for row in read_run_events(tmp_path)] == rows
    assert [row.event for row in read_events_about(tmp_path, {"12", KEY})] == ["SampleIssued", "GroupAdmitted"]
    many = {version_subject(version) for version in range(50)}
    assert [row.event for row in read_events_about(tmp_path, many)] == ["WeightsSwapped"]


def test_an_event_log_works_without_traces() -> None:
    log = EventLog()
    observer = EventObserver(log, name="scorer", epoch=1, now_s=lambda: 0.0)
    observer.handled(TimerFired(key="t"), None, [Send("engine/0", issued())])
    log.flush()
    assert log.num_events == 1
