"""The simulated backends: times that follow from the model, arrays that are real, and answers exactly once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.backends.draws import mixed, normal, uniform
from penstock.backends.engines.options import EnginesOptions, EpisodeModelOptions, LatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.simulated.engine import SimulatedEngine
from penstock.backends.simulated.learner import SimulatedLearner, canary_logprobs
from penstock.backends.simulated.rewards import JudgingModel, SimulatedJudge, SimulatedPrompts, SimulatedScorer
from penstock.backends.simulated.timers import ThreadTimers
from penstock.messages.arrays import tokens_view
from penstock.messages.base import Event
from penstock.messages.canary import canary_difference
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchPrompts,
    FetchWeights,
    Generate,
    InterruptGenerations,
    JudgeGroup,
    OpenLearner,
    PromptRequest,
    PublishWeights,
    SaveCheckpoint,
    Score,
    Train,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EpisodeMoved,
    GenerationAdvanced,
    GenerationEnded,
    GroupJudged,
    LearnerOpened,
    LocalEvent,
    PromptsFetched,
    SampleJudged,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import (
    Cancelled,
    Completed,
    Group,
    InfraError,
    Part,
    Prompt,
    Purpose,
    Sample,
    SampleKey,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import UpdateMode
from penstock.runtime.hosts.virtual.clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.weights import WeightManifest

EventT = TypeVar("EventT", bound=Event)
PROMPT = Prompt(row=0, epoch=0, tokens=b"")
EXACT = LatencyOptions(
    response_tokens_median=100,
    response_tokens_sigma=0.0,
    prefill_s=0.5,
    token_s=0.01,
    token_load_s=0.0,
    apply_weights_s=0.5,
    fetch_weights_s=1.0,
)


class Timeline:
    """A virtual clock as a backend's timers, and what the backend says, with the time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.said: list[tuple[float, LocalEvent]] = []

    def now_s(self) -> float:
        return self.clock.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s >= 0
        self.clock.at(self.clock.now_s + delay_s, lambda call, _: call(), callback, None)

    def emit(self, event: LocalEvent) -> None:
        self.said.append((self.clock.now_s, event))

    def fail(self, error: BaseException) -> None:
        raise error

    def of(self, kind: type[EventT]) -> list[tuple[float, EventT]]:
        return [(at_s, event) for at_s, event in self.said if isinstance(event, kind)]


class EngineBench(Timeline):
    """An engine with weights of version 0 loaded at time 0."""

    def __init__(self, model: LatencyOptions = EXACT, *, slots: int = 8, progress_tokens: int = 1000) -> None:
        super().__init__()
        options = EnginesOptions(backend="simulated", slots=slots, progress_tokens=progress_tokens, simulated=model)
        self.engine = SimulatedEngine(options, max_response_tokens=400, timers=self)
        self.engine.start(self.emit, self.fail)
        self.learner = SimulatedLearner(SimulatedLearnerOptions(publish_s=0.0), seed=3, epoch=0, timers=self)
        self.learner.start(self.emit, self.fail)
        self.load(0)
        self.base_s = self.clock.now_s

    def load(self, version: int, mode: UpdateMode = UpdateMode.DRAIN) -> None:
        """Publish, fetch and apply; time passes."""
        manifest = self.publish(version)
        self.engine.execute(FetchWeights(manifest))
        self.clock.run(self.clock.now_s + 1.0)
        self.engine.execute(ApplyWeights(manifest, mode))
        self.clock.run(self.clock.now_s + 0.5)

    def publish(self, version: int) -> WeightManifest:
        self.learner.execute(PublishWeights(version, version))
        self.clock.run(self.clock.now_s)
        return self.of(WeightsPublished)[-1][1].manifest

    def generate(self, index: int = 0, *, attempt: int = 0, seed: int = 1, prefix: Part | None = None) -> None:
        self.engine.execute(
            Generate(
                key=SampleKey(0, index),
                attempt=attempt,
                purpose=Purpose.TRAIN,
                prompt=PROMPT,
                seed=seed,
                deadline_version=9,
                prefix=prefix,
            )
        )

    def ends(self) -> list[tuple[float, GenerationEnded]]:
        return [(round(at_s - self.base_s, 6), event) for at_s, event in self.of(GenerationEnded)]


# --- engine: time -----------------------------------------------------------------------------------------------------


def test_lone_request_takes_its_prefill_and_a_time_for_each_token() -> None:
    bench = EngineBench()
    bench.generate()
    bench.clock.run(100)
    ((at_s, ended),) = bench.ends()
    assert at_s == pytest.approx(0.5 + 100 * 0.01)
    assert isinstance(ended.outcome, Completed)
    assert ended.part.num_tokens == 100


def test_every_further_request_slows_all_of_them() -> None:
    model = LatencyOptions(
        response_tokens_median=100, response_tokens_sigma=0, prefill_s=0, token_s=0.01, token_load_s=0.005
    )
    bench = EngineBench(model)
    for index in range(3):
        bench.generate(index)
    bench.clock.run(100)
    assert [at_s for at_s, _ in bench.ends()] == pytest.approx([100 * (0.01 + 2 * 0.005)] * 3)


def test_load_counts_for_as_long_as_it_lasts() -> None:
    """One request alone for 50 of its tokens, then beside another: the rest takes twice as long."""
    model = LatencyOptions(
        response_tokens_median=100, response_tokens_sigma=0, prefill_s=0, token_s=0.01, token_load_s=0.01
    )
    bench = EngineBench(model)
    bench.generate(0)
    bench.clock.run(bench.base_s + 0.5)
    bench.generate(1)
    bench.clock.run(100)
    first, second = (at_s for at_s, _ in bench.ends())
    assert first == pytest.approx(0.5 + 50 * 0.02)
    assert second == pytest.approx(first + 50 * 0.01)


def test_requests_beyond_the_slots_wait_in_order() -> None:
    bench = EngineBench(slots=2)
    for index in range(5):
        bench.generate(index)
    assert [metric.value for metric in bench.engine.gauges()][:3] == [2, 3, 1.0]
    bench.clock.run(100)
    assert [ended.key.index for _, ended in bench.ends()] == [0, 1, 2, 3, 4]
    assert [at_s for at_s, _ in bench.ends()] == pytest.approx([1.5, 1.5, 3.0, 3.0, 4.5])


def test_events_of_the_clock_do_not_grow_with_the_tokens() -> None:
    counts: list[int] = []
    for median in (20, 390):
        model = LatencyOptions(response_tokens_median=median, response_tokens_sigma=0.0)
        bench = EngineBench(model, slots=4)
        before = bench.clock.num_steps
        for index in range(12):
            bench.generate(index)
        bench.clock.run(1000)
        counts.append(bench.clock.num_steps - before)
    assert counts[0] == counts[1] <= 24


# --- engine: what it makes --------------------------------------------------------------------------------------------


def test_length_depends_on_the_seed_alone() -> None:
    def lengths(order: list[int], slots: int) -> dict[int, int]:
        bench = EngineBench(LatencyOptions(response_tokens_median=50, response_tokens_sigma=0.8), slots=slots)
        for index in order:
            bench.generate(index, seed=1000 + index)
        bench.clock.run(1000)
        return {ended.key.index: ended.part.num_tokens for _, ended in bench.ends()}

    alone, crowded = lengths(list(range(30)), 1), lengths(list(reversed(range(30))), 16)
    assert alone == crowded
    assert len(set(alone.values())) > 20


def test_lengths_are_log_normal() -> None:
    bench = EngineBench(LatencyOptions(response_tokens_median=60, response_tokens_sigma=0.5), slots=500)
    for index in range(500):
        bench.generate(index, seed=index)
    bench.clock.run(1000)
    drawn = sorted(ended.part.num_tokens for _, ended in bench.ends())
    assert 54 < drawn[250] < 66
    assert 94 < drawn[421] < 104  # one sigma above: 60·e^0.5 = 98.9


def test_response_at_the_limit_is_truncated() -> None:
    bench = EngineBench(LatencyOptions(response_tokens_median=4000, response_tokens_sigma=0))
    bench.generate()
    bench.clock.run(1000)
    ((_, ended),) = bench.ends()
    assert isinstance(ended.outcome, Truncated)
    assert ended.part.num_tokens == 400


def test_reports_add_up_to_the_response() -> None:
    bench = EngineBench(progress_tokens=30)
    bench.generate()
    bench.clock.run(100)
    chunks = [event for _, event in bench.of(GenerationAdvanced)]
    assert [chunk.from_token for chunk in chunks] == [0, 30, 60]
    ((_, ended),) = bench.ends()
    joined = b"".join(chunk.chunk.tokens for chunk in chunks)
    assert ended.part.tokens[: len(joined)] == joined
    assert list(tokens_view(ended.part.tokens)) == list(range(100))


def test_prefix_is_continued_and_not_made_again() -> None:
    bench = EngineBench()
    bench.generate()
    bench.clock.run(bench.base_s + 0.5 + 0.405)
    bench.engine.execute(InterruptGenerations())
    ((_, stopped),) = bench.ends()
    assert isinstance(stopped.outcome, Cancelled)
    assert stopped.part.num_tokens == 40
    bench.load(1)
    again_s = bench.clock.now_s
    bench.generate(attempt=1, prefix=stopped.part)
    bench.clock.run(100)
    at_s, ended = bench.of(GenerationEnded)[-1]
    assert at_s - again_s == pytest.approx(0.5 + 60 * 0.01)
    assert list(tokens_view(ended.part.tokens)) == list(range(100))
    assert ended.part.spans == (VersionSpan(0, 40), VersionSpan(1, 60))


def test_swap_in_flight_stamps_the_tokens_before_and_after_it() -> None:
    bench = EngineBench()
    manifest = bench.publish(1)
    bench.engine.execute(FetchWeights(manifest))
    bench.clock.run(bench.clock.now_s + 1.0)
    start_s = bench.clock.now_s
    bench.generate()
    bench.clock.run(start_s + 0.5 + 0.305)
    bench.engine.execute(ApplyWeights(manifest, UpdateMode.IN_FLIGHT))
    bench.clock.run(100)
    at_s, ended = bench.of(GenerationEnded)[-1]
    assert ended.part.spans == (VersionSpan(0, 30), VersionSpan(1, 70))
    assert at_s - start_s == pytest.approx(0.5 + 1.0 + 0.5), "no token is made while the weights are swapped"


def test_aborted_request_ends_once_with_what_there_is_and_gives_its_slot_away() -> None:
    bench = EngineBench(slots=1)
    bench.generate(0)
    bench.generate(1)
    bench.clock.run(bench.base_s + 0.5 + 0.205)
    for _ in range(2):
        bench.engine.execute(AbortGeneration(SampleKey(0, 0), 0))
    bench.clock.run(100)
    (_, first), (at_s, second) = bench.ends()
    assert (first.key.index, first.outcome, first.part.num_tokens) == (0, Cancelled(cause="aborted"), 20)
    assert second.key.index == 1
    assert at_s == pytest.approx(0.705 + 1.5)


def test_interruption_ends_what_runs_and_what_waits() -> None:
    bench = EngineBench(slots=1)
    bench.generate(0)
    bench.generate(1)
    bench.engine.execute(InterruptGenerations())
    assert [(e.key.index, e.part.num_tokens) for _, e in bench.ends()] == [(0, 0), (1, 0)]


def test_failures_come_in_the_share_that_was_asked_for_and_differ_between_attempts() -> None:
    model = LatencyOptions(response_tokens_median=20, response_tokens_sigma=0, failure_rate=0.3)
    outcomes: list[list[bool]] = []
    for attempt in (0, 1):
        bench = EngineBench(model, slots=400)
        for index in range(400):
            bench.generate(index, attempt=attempt, seed=index)
        bench.clock.run(1000)
        outcomes.append(
            [isinstance(ended.outcome, InfraError) for _, ended in sorted(bench.ends(), key=lambda e: e[1].key)]
        )
    assert all(0.22 < sum(failed) / 400 < 0.38 for failed in outcomes)
    assert outcomes[0] != outcomes[1]


@settings(max_examples=60)
@given(st.data())
def test_every_request_ends_exactly_once_whatever_happens(data: st.DataObject) -> None:
    model = LatencyOptions(
        response_tokens_median=30, token_load_s=0.002, failure_rate=0.2, apply_weights_s=0.1, fetch_weights_s=0.1
    )
    bench = EngineBench(model, slots=3, progress_tokens=7)
    num_requests, version = 0, 0
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(("generate", "generate", "abort", "interrupt", "swap", "wait"))):
            case "generate":
                bench.generate(num_requests, seed=data.draw(st.integers(0, 9999)))
                num_requests += 1
            case "abort":
                bench.engine.execute(AbortGeneration(SampleKey(0, data.draw(st.integers(0, 20))), 0))
            case "interrupt":
                bench.engine.execute(InterruptGenerations())
            case "swap":
                version += 1
                manifest = bench.publish(version)
                bench.engine.execute(FetchWeights(manifest))
                bench.clock.run(bench.clock.now_s + 0.1)
                bench.engine.execute(ApplyWeights(manifest, UpdateMode.IN_FLIGHT))
                bench.clock.run(bench.clock.now_s + data.draw(st.floats(0.1, 0.3)))
            case _:
                bench.clock.run(bench.clock.now_s + data.draw(st.floats(0, 2)))
    bench.clock.run(10_000)
    assert sorted(ended.key.index for _, ended in bench.ends()) == list(range(num_requests))
    for _, ended in bench.ends():
        assert list(tokens_view(ended.part.tokens)) == list(range(ended.part.num_tokens))
        versions = [span.version for span in ended.part.spans]
        assert versions == sorted(set(versions))


# --- engine: weights --------------------------------------------------------------------------------------------------


def test_engine_and_learner_agree_about_the_canary_unless_the_weights_are_wrong() -> None:
    bench = EngineBench()
    bench.load(1)
    bench.engine.corrupt_swaps = 1
    bench.load(2)
    manifests = [event.manifest for _, event in bench.of(WeightsPublished)]
    found = [event.canary_logprobs for _, event in bench.of(WeightsSwapped)]
    differences = [canary_difference(m.canary, own) for m, own in zip(manifests, found, strict=True) if m.canary]
    assert differences[:2] == [0.0, 0.0]
    assert found[0] != found[1]
    assert differences[2] > 0.5


def test_corrupt_fetch_has_another_digest() -> None:
    bench = EngineBench()
    bench.engine.corrupt_fetches = 1
    manifest = bench.publish(1)
    for _ in range(2):
        bench.engine.execute(FetchWeights(manifest))
        bench.clock.run(bench.clock.now_s + 1)
    first, second = [event.digest for _, event in bench.of(WeightsStagedLocally)][-2:]
    assert first != manifest.digest == second


def test_weights_that_were_never_fetched_cannot_be_applied() -> None:
    bench = EngineBench()
    with pytest.raises(RuntimeError, match="never fetched"):
        bench.engine.execute(ApplyWeights(bench.publish(1), UpdateMode.DRAIN))


def test_nothing_may_run_at_a_swap_that_is_not_in_flight() -> None:
    bench = EngineBench()
    manifest = bench.publish(1)
    bench.engine.execute(FetchWeights(manifest))
    bench.clock.run(bench.clock.now_s + 1)
    bench.generate()
    with pytest.raises(RuntimeError, match="requests that run at a swap in mode drain: 1"):
        bench.engine.execute(ApplyWeights(manifest, UpdateMode.DRAIN))


# --- learner, rewards, prompts ----------------------------------------------------------------------------------------


def sample(index: int, *spans: VersionSpan) -> Sample:
    size = sum(span.num_tokens for span in spans)
    part = Part(tokens=b"\0" * 4 * size, logprobs=b"\0" * 4 * size, spans=spans)
    return Sample(key=SampleKey(0, index), parts=(part,), outcome=Completed())


def test_learner_does_one_thing_after_the_other() -> None:
    line = Timeline()
    options = SimulatedLearnerOptions(step_s=2.0, token_s=0.1, publish_s=0.5)
    learner = SimulatedLearner(options, seed=0, epoch=0, timers=line)
    learner.start(line.emit, line.fail)
    group = Group(group_id=0, prompt=PROMPT, samples=(sample(0, VersionSpan(0, 6), VersionSpan(1, 4)),))
    learner.execute(OpenLearner())
    learner.execute(Train(version=1, groups=(group,), min_token_version=1))
    learner.execute(PublishWeights(1, 0))
    learner.execute(SaveCheckpoint(1))
    line.clock.run(100)
    assert [(round(at_s, 6), type(event)) for at_s, event in line.said] == [
        (0.0, LearnerOpened),
        (3.0, BatchTrained),
        (3.5, WeightsPublished),
        (4.0, CheckpointWritten),
    ]
    ((_, trained),) = line.of(BatchTrained)
    assert (trained.num_trained_tokens, trained.num_masked_tokens) == (4, 6)


def test_rewards_are_a_pure_function_of_seed_and_sample() -> None:
    def rewards(seed: int) -> list[float | None]:
        line = Timeline()
        scorer = SimulatedScorer(JudgingModel(success_rate=0.3), seed=seed, timers=line)
        scorer.start(line.emit, line.fail)
        for index in range(300):
            scorer.execute(Score(sample=sample(index), prompt=PROMPT, timeout_s=1.0))
        line.clock.run(10)
        return [event.reward.value if event.reward else None for _, event in line.of(SampleJudged)]

    assert rewards(1) == rewards(1) != rewards(2)
    assert 0.22 < sum(value or 0.0 for value in rewards(1)) / 300 < 0.38


def test_reward_that_fails_or_hangs_is_no_reward_and_is_answered_by_its_deadline() -> None:
    line = Timeline()
    scorer = SimulatedScorer(JudgingModel(failure_rate=0.5, hang_rate=0.3), seed=1, timers=line)
    scorer.start(line.emit, line.fail)
    for index in range(100):
        scorer.execute(Score(sample=sample(index), prompt=PROMPT, timeout_s=3.0))
    line.clock.run(10)
    judged = line.of(SampleJudged)
    assert len(judged) == 100
    assert all((event.reward is None) == bool(event.reason) for _, event in judged)
    assert {round(at_s, 6) for at_s, _ in judged} == {0.01, 3.0}


def test_verdicts_come_in_the_share_that_was_asked_for() -> None:
    line = Timeline()
    judge = SimulatedJudge(JudgingModel(rejection_rate=0.4), seed=1, timers=line)
    judge.start(line.emit, line.fail)
    for group_id in range(300):
        judge.execute(JudgeGroup(Group(group_id=group_id, prompt=PROMPT, samples=())))
    line.clock.run(10)
    assert 90 < sum(not event.keep for _, event in line.of(GroupJudged)) < 150


def test_prompts_have_the_row_that_was_asked_for_and_the_length_of_the_model() -> None:
    line = Timeline()
    prompts = SimulatedPrompts(seed=1, prompt_tokens=17, latency_s=0.1, timers=line)
    prompts.start(line.emit, line.fail)
    prompts.execute(FetchPrompts((PromptRequest(4, 9, 2), PromptRequest(5, 3, 0))))
    line.clock.run(1)
    ((_, fetched),) = line.of(PromptsFetched)
    assert [(p.group_id, p.prompt.row, p.prompt.epoch, p.prompt.num_tokens) for p in fetched.prompts] == [
        (4, 9, 2, 17),
        (5, 3, 0, 17),
    ]


# --- draws and real timers --------------------------------------------------------------------------------------------


def test_draws_depend_on_every_key_and_on_their_order() -> None:
    draws = {mixed(a, b) for a in range(100) for b in range(100)}
    assert len(draws) == 10_000
    assert mixed(1, 2) != mixed(2, 1)


def test_draws_are_spread_as_they_should_be() -> None:
    uniforms = [uniform(7, n) for n in range(20_000)]
    assert all(0 <= u < 1 for u in uniforms)
    assert abs(sum(uniforms) / 20_000 - 0.5) < 0.01
    normals = [normal(7, n) for n in range(20_000)]
    mean = sum(normals) / 20_000
    assert abs(mean) < 0.03
    assert abs(sum((n - mean) ** 2 for n in normals) / 20_000 - 1) < 0.04


def test_canary_depends_on_every_token_and_on_the_digest() -> None:
    tokens = b"".join(n.to_bytes(4, "little") for n in range(8))
    assert len(canary_logprobs(tokens, "a")) == 7 * 8 * 4
    assert canary_logprobs(tokens, "a") != canary_logprobs(tokens, "b")


def test_real_timers_call_in_the_order_of_their_times_and_nothing_after_close() -> None:
    called: list[str] = []
    done, late = threading.Event(), threading.Event()
    timers = ThreadTimers(fail=lambda error: pytest.fail(str(error)))

    def last() -> None:
        called.append("later")
        done.set()

    timers.call_later(0.02, last)
    timers.call_later(0.0, lambda: called.append("first"))
    timers.call_later(0.0, lambda: called.append("second"))
    assert done.wait(10)
    assert called == ["first", "second", "later"]
    timers.call_later(60.0, late.set)
    timers.close(10.0)
    timers.call_later(0.0, late.set)
    assert not late.is_set()


def test_callback_that_raises_is_told() -> None:
    heard: list[BaseException] = []
    told = threading.Event()

    def fail(error: BaseException) -> None:
        heard.append(error)
        told.set()

    def breaks() -> None:
        raise ZeroDivisionError

    timers = ThreadTimers(fail)
    timers.call_later(0.0, breaks)
    assert told.wait(10)
    assert isinstance(heard[0], ZeroDivisionError)
    timers.close(10.0)


def test_engine_runs_on_real_time_too() -> None:
    timers = ThreadTimers(fail=lambda error: pytest.fail(str(error)))
    model = LatencyOptions(
        response_tokens_median=20, prefill_s=0.0, token_s=0.0005, apply_weights_s=0, fetch_weights_s=0
    )
    options = EnginesOptions(backend="simulated", slots=4, simulated=model)
    engine = SimulatedEngine(options, max_response_tokens=100, timers=timers)
    said: list[LocalEvent] = []
    enough = threading.Event()

    def emit(event: LocalEvent) -> None:
        said.append(event)
        if sum(isinstance(e, GenerationEnded) for e in said) == 20 or isinstance(
            event, WeightsStagedLocally | WeightsSwapped
        ):
            enough.set()

    engine.start(emit, lambda error: pytest.fail(str(error)))
    manifest = EngineBench().publish(0)
    for command in (FetchWeights(manifest), ApplyWeights(manifest, UpdateMode.DRAIN)):
        enough.clear()
        engine.execute(command)
        assert enough.wait(10)
    enough.clear()
    for index in range(20):
        key = SampleKey(0, index)
        engine.execute(
            Generate(key=key, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=index, deadline_version=0)
        )
    assert enough.wait(30)
    timers.close(10.0)
    assert sorted(e.key.index for e in said if isinstance(e, GenerationEnded)) == list(range(20))


# --- episodes ---------------------------------------------------------------------------------------------------------

TOOLS = EpisodeModelOptions(turns=(0, 0, 1), tool_s=2.0, reply_tokens=10, end_s=1.0)


def test_an_episode_waits_for_its_tools_between_turns_and_holds_its_slot() -> None:
    bench = EngineBench(replace(EXACT, episode=TOOLS), slots=1)
    bench.generate(0)
    bench.generate(1)
    bench.clock.run(bench.base_s + 40.0)
    # Three turns of 0.5 s and 100 tokens, two waits, and the end.
    assert [at_s - bench.base_s for at_s, _ in bench.of(GenerationEnded)] == pytest.approx([9.5, 19.0])
    ended = bench.of(GenerationEnded)[0][1]
    assert ended.outcome == Completed()
    assert ended.part.num_tokens == 3 * 100 + 2 * 10
    moved = bench.of(EpisodeMoved)[:6]
    assert [event.num_outside for _, event in moved] == [1, 0] * 3
    assert [at_s - bench.base_s for at_s, _ in moved] == pytest.approx([1.5, 3.5, 5.0, 7.0, 8.5, 9.5])


def test_while_an_episode_is_with_its_tools_the_others_are_as_quick_as_without_it() -> None:
    bench = EngineBench(replace(EXACT, episode=replace(TOOLS, turns=(0, 1)), token_load_s=0.01))
    bench.generate(0)
    bench.clock.run(bench.base_s + 1.6)  # the first is outside from 1.5 to 3.5 s
    bench.generate(1)
    bench.clock.run(bench.base_s + 3.4)
    moved = [(at_s - bench.base_s, event.key.index) for at_s, event in bench.of(EpisodeMoved)]
    assert [index for _, index in moved] == [0, 1]
    assert [at_s for at_s, _ in moved] == pytest.approx([1.5, 3.1])


def test_an_episode_that_was_taken_from_its_tools_goes_on_behind_what_they_say() -> None:
    bench = EngineBench(replace(EXACT, episode=TOOLS))
    bench.generate(0)
    bench.clock.run(bench.base_s + 2.0)
    bench.engine.execute(InterruptGenerations())
    (_, interrupted), *_ = bench.of(GenerationEnded)
    assert interrupted.part.num_tokens == 100
    assert [event.num_outside for _, event in bench.of(EpisodeMoved)] == [1, 0]
    bench.generate(0, attempt=1, prefix=interrupted.part)
    bench.clock.run(bench.base_s + 40.0)
    ended = bench.of(GenerationEnded)[-1][1]
    assert ended.part.num_tokens == 320
    assert sum(span.num_tokens for span in ended.part.spans) == 320
    assert {span.version for span in ended.part.spans} == {0}
    assert len(bench.of(GenerationEnded)) == 2, "the wait that was under way has come to nothing"


def test_what_stands_before_a_turn_is_read_again_as_far_as_the_model_says() -> None:
    model = replace(EXACT, prefill_token_s=0.01, episode=replace(TOOLS, turns=(0, 1), end_s=0.0, reread_share=0.5))
    bench = EngineBench(model)
    bench.generate(0)
    bench.clock.run(bench.base_s + 40.0)
    # Two turns of 1.5 s, one wait, and half of 100 tokens besides the 10 of the reply are read.
    assert bench.of(GenerationEnded)[0][0] - bench.base_s == pytest.approx(5.0 + 0.6)


def test_turns_and_waits_follow_their_distributions() -> None:
    model = LatencyOptions(
        response_tokens_median=5, response_tokens_sigma=0.0, prefill_s=0.0, token_s=0.001, apply_weights_s=0.5,
        fetch_weights_s=1.0, episode=EpisodeModelOptions(turns=(1, 2, 1), tool_s=3.0, tool_sigma=0.5, reply_tokens=0),
    )  # fmt: skip
    bench = EngineBench(model, slots=400)
    for index in range(400):
        bench.generate(index, seed=index)
    bench.clock.run(bench.base_s + 1000.0)
    turns = [ended.part.num_tokens // 5 for _, ended in bench.of(GenerationEnded)]
    assert [turns.count(number) / 400 for number in (1, 2, 3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.06)
    waits = sorted(at_s - bench.base_s for at_s, ended in bench.of(GenerationEnded) if ended.part.num_tokens == 10)
    assert waits[len(waits) // 2] == pytest.approx(3.0, rel=0.12)
