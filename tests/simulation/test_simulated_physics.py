"""The physics of the simulated backends: what prefills, contexts, limits, sizes and starts cost."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from msgspec.structs import replace
from test_simulated_backends import EXACT, EngineBench, Timeline

from penstock.backends.engines.options import EnginesOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.simulated.engine import SimulatedEngine
from penstock.backends.simulated.learner import SimulatedLearner
from penstock.backends.simulated.lengths import quantile
from penstock.backends.simulated.rewards import JudgingModel, SimulatedScorer
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import (
    FetchWeights,
    Generate,
    OpenEngine,
    OpenLearner,
    PublishWeights,
    SaveCheckpoint,
    SleepLearner,
    Train,
)
from penstock.messages.commands import Score as ScoreCommand
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EngineOpened,
    GenerationEnded,
    LearnerOpened,
    SampleJudged,
    WeightsPublished,
    WeightsStagedLocally,
)
from penstock.messages.samples import Completed, Part, Prompt, Purpose, Sample, SampleKey

LEAN = replace(EXACT, prefill_s=0.0)


def asked(bench: EngineBench, group_id: int, index: int = 0, *, prompt_tokens: int = 50) -> None:
    bench.engine.execute(
        Generate(
            key=SampleKey(group_id, index),
            attempt=0,
            purpose=Purpose.TRAIN,
            prompt=Prompt(row=group_id, epoch=0, tokens=pack_tokens(range(prompt_tokens))),
            seed=abs(1000 * group_id) + index,
            deadline_version=9,
        )
    )


def ends(bench: EngineBench) -> dict[tuple[int, int], float]:
    return {(ended.key.group_id, ended.key.index): at_s for at_s, ended in bench.ends()}


def test_a_prefill_holds_up_what_is_decoded_and_is_done_once_for_a_group() -> None:
    bench = EngineBench(replace(LEAN, prefill_token_s=0.002))
    asked(bench, 0)
    bench.clock.run(bench.base_s + 0.6)  # its prefill, then 50 of its 100 tokens
    asked(bench, 1)
    asked(bench, 1, 1)
    bench.clock.run(100)
    # One prompt of 50 tokens is read meanwhile, for both of the second group.
    assert ends(bench) == pytest.approx({(0, 0): 1.2, (1, 0): 1.7, (1, 1): 1.7})


def test_a_prompt_is_read_again_under_new_weights() -> None:
    bench = EngineBench(replace(LEAN, prefill_token_s=0.002))
    asked(bench, 0)
    bench.clock.run(bench.clock.now_s + 10)
    bench.load(1)
    began_s = bench.clock.now_s - bench.base_s
    asked(bench, 0, 1)
    bench.clock.run(100)
    assert ends(bench)[0, 1] - began_s == pytest.approx(50 * 0.002 + 100 * 0.01)


def test_a_step_takes_longer_the_more_tokens_the_running_requests_hold() -> None:
    bench = EngineBench(replace(LEAN, context_token_s=0.0001))
    asked(bench, 0)
    asked(bench, 1)
    bench.clock.run(100)
    # 100 steps, the first with 100 tokens held, two more with each: the integral of 0.01 + 0.0001·(100 + 2x).
    assert list(ends(bench).values()) == pytest.approx([100 * 0.02 + 0.0001 * 100**2] * 2)


def test_a_context_counts_for_as_long_as_its_request_runs() -> None:
    bench = EngineBench(replace(LEAN, context_token_s=0.0001))
    asked(bench, 0)
    bench.clock.run(100)
    began_s = bench.clock.now_s - bench.base_s
    asked(bench, 1)
    bench.clock.run(200)
    first, second = ends(bench).values()
    assert second - began_s == pytest.approx(first)


def test_requests_wait_for_room_and_are_sent_back_where_they_grow_beyond_it() -> None:
    bench = EngineBench(replace(LEAN, prefill_token_s=0.001, kv_tokens=140), progress_tokens=30)
    for group in range(3):
        asked(bench, group)
    assert [metric.value for metric in bench.engine.gauges()][:2] == [2, 1]  # 50 + 50 are held, a third is too many
    bench.clock.run(100)
    # Two have made 20 tokens each when 140 are held: the second goes back. When the first has ended it is read again,
    # with these 20, beside the third one's prompt; that one goes back after 10 tokens.
    first_s = 2 * 0.05 + 100 * 0.01
    second_s = first_s + (0.05 + 0.02) + 0.05 + 80 * 0.01
    third_s = second_s + (0.05 + 0.01) + 90 * 0.01
    assert ends(bench) == pytest.approx({(0, 0): first_s, (1, 0): second_s, (2, 0): third_s})
    for _, ended in bench.of(GenerationEnded):
        assert isinstance(ended.outcome, Completed)
        assert ended.part.tokens == pack_tokens(range(100))  # no hole, nothing twice
        assert sum(span.num_tokens for span in ended.part.spans) == 100
    assert not bench.engine.gauges()[0].value


def test_a_lone_request_may_hold_more_than_the_limit() -> None:
    bench = EngineBench(replace(LEAN, kv_tokens=10))
    asked(bench, 0)
    asked(bench, 1)
    bench.clock.run(100)
    assert list(ends(bench).values()) == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("together", [0.0, 0.6, 1.0])
def test_lengths_follow_recorded_quantiles_and_go_together_within_a_group(together: float) -> None:
    model = replace(LEAN, response_tokens_quantiles=(10.0, 20.0, 100.0, 300.0), response_tokens_correlation=together)
    bench = EngineBench(model, slots=5000)
    for group in range(500):
        for index in range(4):
            asked(bench, group, index, prompt_tokens=1)
    bench.clock.run(1000)
    lengths: dict[int, list[int]] = {}
    for _, ended in bench.of(GenerationEnded):
        lengths.setdefault(ended.key.group_id, []).append(ended.part.num_tokens)
    drawn = sorted(length for group in lengths.values() for length in group)
    assert drawn[0] >= 10
    assert drawn[-1] <= 300
    assert drawn[len(drawn) // 2] == pytest.approx(60, rel=0.15)
    within = statistics.fmean(statistics.pvariance(group) for group in lengths.values()) / statistics.pvariance(drawn)
    assert within == pytest.approx(0.75 * (1 - together), abs=0.08)


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_lengths_change_over_training_by_the_number_of_the_group(sigma: float) -> None:
    course = {"response_tokens_course": (0.5, 2.0, 1.0), "response_tokens_course_groups": 40}
    steady = replace(LEAN, response_tokens_median=40.0, response_tokens_sigma=sigma)
    lengths: list[list[int]] = []
    for model in (steady, replace(steady, **course)):
        bench = EngineBench(model, slots=100)
        for group in (0, 10, 20, 30, 40, 400, -1):
            asked(bench, group)
        bench.clock.run(1000)
        ended = sorted(bench.of(GenerationEnded), key=lambda each: each[1].key.group_id)
        lengths.append([each.part.num_tokens for _, each in ended])
    alike, changed = lengths
    factors = [1.0, 0.5, 1.25, 2.0, 1.5, 1.0, 1.0]  # the first is of an evaluation
    assert changed == pytest.approx([length * factor for length, factor in zip(alike, factors, strict=True)], abs=2)


def test_a_course_of_one_factor_is_that_factor() -> None:
    bench = EngineBench(replace(LEAN, response_tokens_median=100.0, response_tokens_course=(3.0,)), slots=9)
    asked(bench, 5)
    bench.clock.run(100)
    [(_, ended)] = bench.of(GenerationEnded)
    assert ended.part.num_tokens == 300


def test_a_quantile_lies_on_the_line_between_two() -> None:
    assert [quantile((10.0, 20.0, 40.0), share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [10, 15, 20, 30, 40]


class Learner(Timeline):
    """A learner with this model."""

    def __init__(self, **model: Any) -> None:  # noqa: ANN401 - options
        super().__init__()
        self.learner = SimulatedLearner(SimulatedLearnerOptions(**model), seed=3, epoch=0, timers=self)
        self.learner.start(self.emit, self.fail)


def test_exports_fetches_and_swaps_take_longer_the_more_bytes_there_are() -> None:
    bench = Learner(publish_s=0.5, publish_byte_s=1e-9, size_bytes=2_000_000_000)
    bench.learner.execute(PublishWeights(1, 1))
    bench.clock.run(100)
    ((at_s, published),) = bench.of(WeightsPublished)
    assert (at_s, published.manifest.size_bytes) == (2.5, 2_000_000_000)
    for count, expected_s in ((1, 5.5), (6, 8.0)):  # of the link that they share each has one part
        line = Timeline()
        model = replace(EXACT, fetch_byte_s=2e-9, fetch_shared_byte_s=0.25e-9)
        options = EnginesOptions(backend="simulated", count=count, simulated=model)
        engine = SimulatedEngine(options, max_response_tokens=10, timers=line, seed=0)
        engine.start(line.emit, line.fail)
        engine.execute(FetchWeights(published.manifest))
        line.clock.run(100)
        assert [at_s for at_s, _ in line.of(WeightsStagedLocally)] == pytest.approx([expected_s])


def test_checkpoints_and_starts_take_their_own_time() -> None:
    bench = Learner(publish_s=0.5, checkpoint_s=3.0, start_s=20.0)
    bench.learner.execute(OpenLearner(version=0, path=""))
    bench.clock.run(50)
    bench.learner.execute(SaveCheckpoint(1))
    bench.clock.run(100)
    assert [at_s for at_s, _ in bench.of(LearnerOpened)] == [20.0]
    assert [at_s for at_s, _ in bench.of(CheckpointWritten)] == [53.0]
    line = Timeline()
    options = EnginesOptions(backend="simulated", simulated=replace(EXACT, start_s=12.0))
    engine = SimulatedEngine(options, max_response_tokens=10, timers=line)
    engine.start(line.emit, line.fail)
    engine.execute(OpenEngine())
    line.clock.run(100)
    assert [at_s for at_s, _ in line.of(EngineOpened)] == [12.0]


def test_a_step_waits_for_the_copy_of_a_checkpoint_and_not_for_its_writing() -> None:
    bench = Learner(step_s=2.0, snapshot_s=0.5, checkpoint_s=3.0)
    bench.learner.execute(SaveCheckpoint(0))
    bench.learner.execute(Train(version=1, groups=(), min_token_version=0))
    with pytest.raises(RuntimeError, match=r"SaveCheckpoint\(1\) came while that of version 0 is written"):
        bench.learner.execute(SaveCheckpoint(1))
    bench.clock.run(3.4)
    bench.learner.execute(SleepLearner())  # its memory is not what is written from
    bench.clock.run(5.0)
    bench.learner.execute(SaveCheckpoint(1))
    bench.clock.run(100)
    assert [at_s for at_s, _ in bench.of(BatchTrained)] == [2.5]
    assert [(at_s, event.version) for at_s, event in bench.of(CheckpointWritten)] == [(3.5, 0), (8.5, 1)]


def judged(model: JudgingModel, num_groups: int) -> list[tuple[float, SampleJudged]]:
    bench = Timeline()
    scorer = SimulatedScorer(model, seed=5, timers=bench)
    scorer.start(bench.emit, bench.fail)
    part = Part(tokens=b"", logprobs=b"", spans=())
    for group in range(num_groups):
        for index in range(4):
            sample = Sample(key=SampleKey(group, index), outcome=Completed(), parts=(part,))
            scorer.execute(ScoreCommand(prompt=Prompt(row=0, epoch=0, tokens=b""), sample=sample, timeout_s=50.0))
    bench.clock.run(100)
    return bench.of(SampleJudged)


def test_latencies_of_rewards_are_log_normal_and_end_at_the_deadline() -> None:
    times = sorted(at_s for at_s, _ in judged(JudgingModel(latency_s=2.0, latency_sigma=1.0), 500))
    assert times[1000] == pytest.approx(2.0, rel=0.1)
    assert times[1682] == pytest.approx(2.0 * 2.718, rel=0.15)  # one sigma above
    assert times[-1] <= 50.0


def test_rewards_beyond_the_workers_wait_in_order() -> None:
    times = [at_s for at_s, _ in judged(JudgingModel(latency_s=2.0, num_workers=3), 2)]
    assert times == [2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 6.0, 6.0]


def test_a_share_of_the_groups_gets_one_reward_for_all_samples() -> None:
    rewards: dict[int, set[float]] = {}
    for _, answer in judged(JudgingModel(constant_rate=0.5), 1000):
        assert answer.reward is not None
        rewards.setdefault(answer.key.group_id, set()).add(answer.reward.value)
    constant = sum(len(values) == 1 for values in rewards.values()) / len(rewards)
    assert constant == pytest.approx(0.5 + 0.5 * 2 * 0.5**4, abs=0.05)
