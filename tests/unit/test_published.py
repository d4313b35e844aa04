"""The studies of published runs: what they are made of, and the case in which a second half of the GPUs slows a run."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from penstock.actors.buffer.policies import BufferState
from penstock.benchmarks.published import (
    areal,
    areal_policy,
    marin,
    nemo_rl,
    pipelinerl,
    skypilot,
    verl,
    verl_policies,
)
from penstock.benchmarks.published._model import bisected
from penstock.messages.training import UpdateMode
from penstock.runtime.prediction.imports.lengths import mean_of_cut
from penstock.runtime.prediction.steady import stretch_of

PAGE = Path(__file__).parents[2] / "docs" / "studies" / "published.md"


def test_a_falling_function_is_met_or_an_end_is_taken() -> None:
    assert bisected(0.25, lambda x: 1 / x, 1, 10, rounds=30) == pytest.approx(4)
    assert bisected(5.0, lambda x: 1 / x, 1, 10, rounds=30) == pytest.approx(1)


def test_the_mean_of_cut_lengths_is_that_of_drawn_ones() -> None:
    chance = random.Random(1)
    drawn = [min(900.0, chance.lognormvariate(6.5, 0.5)) for _ in range(50_000)]
    assert mean_of_cut(math.exp(6.5), 0.5, 900.0) == pytest.approx(statistics.fmean(drawn), rel=0.01)


def test_experts_that_none_has_chosen_are_not_read() -> None:
    model = nemo_rl.QWEN3_30B
    whole = model.num_parameters * nemo_rl.BYTES
    assert model.read_bytes(10_000) == pytest.approx(whole)
    assert model.read_bytes(1) == pytest.approx(whole * (0.05 + 0.95 * 8 / 128))


def test_half_of_the_gpus_for_training_is_too_few_where_training_has_most_of_the_work() -> None:
    pair = nemo_rl.PAIRS[-1]
    found = nemo_rl.predicted(pair, seed=0)
    assert found.training_s == pytest.approx(2 * (pair.on_policy_s - found.generation_s))
    assert found.generation_s < pair.on_policy_s / 2 < pair.on_policy_s < found.one_off_s


def test_each_setting_says_what_its_run_did() -> None:
    few = skypilot.setting(1, 0.2, skypilot.SLOTS)
    assert few.group_size * few.groups_per_batch == 184
    state = BufferState(
        version=20, announced_version=16, groups_per_batch=10, outstanding=0, ready=0, target_outstanding=0
    )
    targets: list[int] = []
    for threshold in verl.MEASURED_S:
        policy = getattr(verl_policies, verl.streamed(threshold, 0.5, 0.01).policy.rpartition(":")[2])
        targets.append(policy(max_staleness=48, update_mode=UpdateMode.IN_FLIGHT).target(state))
    assert targets == [120, 136, 168, 200]  # of 160, 176, 208, 240, of which four batches of 10 are trained
    capacity = [
        areal_policy.Capacity(max_staleness=run.max_staleness or 0, update_mode=UpdateMode.IN_FLIGHT).target(state)
        for eta in areal.SHORT.tokens_a_second
        if eta and (run := areal.setting(areal.SHORT, eta, 1000.0, unit_s=1e-3, training_s=1.0))
    ]
    assert capacity == [50, 90, 170]  # (η + 1) batches of 10
    for pair in nemo_rl.PAIRS:
        made = nemo_rl.setting(pair, pair.num_gpus, pair.gpus_an_engine, 0.5)
        share = made.engines / (pair.num_gpus // pair.gpus_an_engine)
        assert made.group_size * made.groups_per_batch == pytest.approx(pair.num_samples * share)


def test_what_is_not_bound_by_age_waits_for_no_long_response() -> None:
    runs = areal.fitted(areal.SHORT, 2_500.0, seed=0)
    assert runs[0].step_time_s(0) == pytest.approx(areal.SHORT.published_s(0), rel=0.01)
    by_capacity = areal.setting(areal.LONG, 2, 2_500.0, unit_s=6e-3, training_s=60.0)
    by_age = by_capacity._replace(policy="fully_async", max_staleness=2)
    assert by_capacity.step_time_s(0) < 0.9 * by_age.step_time_s(0)


def test_lengths_from_a_lower_limit_have_the_mean_that_a_higher_one_brought() -> None:
    mean = mean_of_cut(marin.LENGTHS.median, marin.LENGTHS.sigma, marin.LONGEST)
    assert mean == pytest.approx(3_829_716 / 3_200, rel=0.03)  # of the synchronous run, which no length is fitted to


def test_a_greater_allowance_is_quicker() -> None:
    alone = marin.generation(marin.ENGINES, marin.LENGTHS.median, 0.01)
    runs = [marin.overlapped(alone, each, marin.TRAINING_S, marin.WEIGHTS_S)._replace(num_steps=16) for each in (1, 4)]
    little_s, much_s = (run.step_time_s(0) for run in runs)
    assert much_s < 0.85 * little_s
    steady = stretch_of(marin.NUM_STEPS, 1)
    assert steady is not None
    assert (steady[1] - steady[0]) % 2 == 0


def test_a_run_in_turns_lasts_as_long_as_its_longest_sequence_and_its_training() -> None:
    assert (pipelinerl.ESTIMATE.lag, pipelinerl.RUN.lag) == (9, 49)  # 8.25 and 48.8 batches
    run = pipelinerl.in_turns(pipelinerl.ESTIMATE, *pipelinerl.PIPELINE)
    generation_s = 2 * pipelinerl.MEAN * pipelinerl.PASS_S
    assert run.step_time_s(0) == pytest.approx(generation_s + run.step_s, rel=0.02)
    generated, trained = pipelinerl.PIPELINE
    beside = pipelinerl.pipeline(pipelinerl.ESTIMATE, generated, trained)
    # What its engines can generate in a step is what the learner can train in it, but for the 1 % between the two.
    can_make = beside.engines * beside.slots * beside.step_s / pipelinerl.PASS_S
    assert can_make == pytest.approx(beside.groups_per_batch * pipelinerl.MEAN * generated / trained, rel=0.005)


def test_the_page_has_every_published_figure() -> None:
    text = PAGE.read_text()
    times = [*skypilot.MEASURED_S.values(), *verl.MEASURED_S.values()]
    times += [each for pair in nemo_rl.PAIRS for each in (pair.on_policy_s, pair.one_off_s)]
    times += [each / 1000 for sweep in areal.SWEEPS for each in sweep.tokens_a_second.values()]
    times += [*areal.HOURS.values(), *pipelinerl.PIPELINE, pipelinerl.IN_TURNS, pipelinerl.SPEED_UP, pipelinerl.OLDEST]
    times += [each.total_s for each in marin.CADENCES]
    times += [total_s for sweep in (marin.MAIN, marin.BRANCH) for total_s in sweep.total_s.values()]
    assert [time for time in times if f"{time:,.1f}" not in text and f"{time:,g}" not in text] == []
