"""What a reward function names beside the reward: figures of each step, and a chart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from test_observability_report import FACTS, SCENARIO, finished, step

from penstock.actors.buffer.report import step_report
from penstock.backends.episodes.functions.ends import end_of
from penstock.backends.episodes.play import End
from penstock.backends.processes.user_code import text_of
from penstock.backends.rewards.functions import NoRewardError, judged, kept
from penstock.messages.base import Metric
from penstock.messages.samples import MAX_COMPONENTS, Completed, Group, Reward
from penstock.messages.training import Balance, StepFinished
from penstock.runtime.observability.component_names import MAX_NAME_CHARACTERS, MAX_NAMES, ComponentNames
from penstock.runtime.observability.metrics import RunMetrics
from penstock.runtime.observability.plots import learning_charts
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import StepRow, read_steps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.training import StepReported


def with_components(group: Group, *components: dict[str, float]) -> Group:
    samples = (
        replace(
            sample,
            outcome=Completed(
                reward=Reward(value=1.0, components=tuple(Metric(name, value) for name, value in named.items()))
            ),
        )
        for sample, named in zip(group.samples, components, strict=True)
    )
    return replace(group, samples=tuple(samples))


def test_each_component_is_a_mean_over_the_samples_that_have_it() -> None:
    groups = (
        with_components(drive.group(0), {"format": 1.0, "length": -0.5}, {"format": 0.0}),
        with_components(drive.group(1), {"format": 0.5}, {}),
    )
    receipt = StepFinished(version=1, group_ids=(0, 1), num_trained_tokens=16, max_staleness=0)
    report = step_report(groups, receipt, (), num_steps=3, balance=Balance(issued=4, in_system=0, ended=()))
    found = {metric.name: metric.value for metric in report.metrics if metric.name.startswith("rollout/reward/")}
    assert found == {"rollout/reward/format": 0.5, "rollout/reward/length": -0.5}


def test_rewards_have_a_mean_and_a_standard_deviation_and_what_is_imitated_has_neither() -> None:
    def figures(*rewards: float | None) -> dict[str, float]:
        outcomes = (Completed(reward=None if reward is None else Reward(value=reward)) for reward in rewards)
        one_each = (drive.group(number) for number in range(3))
        groups = tuple(
            replace(group, samples=(replace(group.samples[0], outcome=outcome),))
            for group, outcome in zip(one_each, outcomes, strict=True)
        )
        receipt = StepFinished(version=1, group_ids=(0, 1, 2), num_trained_tokens=16, max_staleness=0)
        report = step_report(groups, receipt, (), num_steps=3, balance=Balance(issued=3, in_system=0, ended=()))
        return {metric.name: metric.value for metric in report.metrics if "raw_reward" in metric.name}

    assert figures(0.5, None, 1.5) == {"rollout/raw_reward": 1.0, "rollout/raw_reward_std": 0.5}
    assert figures(None, None, None) == {}


def test_components_have_one_chart_and_a_run_without_any_has_none() -> None:
    rows = [
        StepRow(
            version=version,
            at_s=float(version),
            num_steps=3,
            metrics={"rollout/raw_reward": 0.5, "rollout/reward/format": 0.1 * version},
            staleness_counts=(),
            response_lengths=(),
            group_ids=(),
            balance=Balance(issued=0, in_system=0, ended=()),
        )
        for version in (1, 2, 3)
    ]
    titles = [chart.title for chart in learning_charts(rows)]
    assert titles == ["Reward", "Components of the reward"]
    (chart,) = (chart for chart in learning_charts(rows) if chart.title == "Components of the reward")
    assert [(line.label, line.y) for line in chart.lines] == [("format", [0.1, 0.2, 0.3])]
    plain = [replace(row, metrics={"rollout/raw_reward": 0.5}) for row in rows]
    assert [chart.title for chart in learning_charts(plain)] == ["Reward"]


def named(version: int, *names: str) -> StepReported:
    metrics = (*step(version).metrics, *(Metric(f"rollout/reward/{name}", 1.0) for name in names))
    return replace(step(version), metrics=metrics)


def components_in(folder: Path) -> list[set[str]]:
    """Of each step."""
    found = ({name for name in row.metrics if name.startswith("rollout/reward/")} for row in read_steps(folder))
    return [{name.removeprefix("rollout/reward/") for name in names} for names in found]


def test_a_run_follows_so_many_names_of_components_and_tells_once_of_others(tmp_path: Path) -> None:
    first, later = [f"a{n}" for n in range(MAX_NAMES - 2)], [f"b\x1b{n}" for n in range(MAX_NAMES)]
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    metrics = RunMetrics(scenario="s", policy="p", num_steps=25)
    recorder = RunRecorder(tmp_path, FACTS, metrics=metrics)
    recorder.step(named(1, *first, "x" * (MAX_NAME_CHARACTERS + 1)), 1.0)
    recorder.step(named(2, *later, "a0"), 2.0)
    assert "mine/longest" in read_steps(tmp_path)[1].metrics
    recorder.finish(finished(2), 3.0)
    assert components_in(tmp_path) == [set(first), {"a0", "b\x1b0"}]
    assert generate_latest(metrics.registry).count(b"\npenstock_step_rollout_reward_") == MAX_NAMES - 1
    summary = read_summary(tmp_path)
    assert summary is not None
    (warning,) = summary.warnings
    assert warning.startswith(f"figures of the reward are left out of the metrics, '{'x' * 79}…' first: a run follows ")

    again = RunRecorder(tmp_path, FACTS, resumes=True)
    again.step(named(3, "c", "a1"), 4.0)
    again.finish(finished(3), 5.0)
    assert components_in(tmp_path)[2] == {"a1"}, "those of before are known"


def test_the_components_of_evaluations_count_as_well() -> None:
    names = ComponentNames(f"eval/sums/components/{n}" for n in range(MAX_NAMES))
    assert names.follows("rollout/reward/0")
    assert names.follows("eval/riddles/components/0")
    assert names.warning() is None
    assert not names.follows("eval/riddles/components/other")
    assert not names.follows("rollout/zero_std/count_0.5")
    assert names.follows("eval/riddles/reward_mean")
    assert "'other' first" in (names.warning() or "")
    assert names.warning() is None, "it is told once"


def test_a_reward_has_no_more_components_than_may_be_reported() -> None:
    most = {"reward": 1.0, **{f"c{n}": 0.0 for n in range(MAX_COMPONENTS)}}
    assert len(judged(0, 0.0, most).components) == MAX_COMPONENTS
    with pytest.raises(NoRewardError, match=f"returned {MAX_COMPONENTS + 1} components; at most {MAX_COMPONENTS}"):
        judged(0, 0.0, most | {"one more": 0.0})


def test_names_and_reasons_can_be_sent_whatever_the_model_spelled() -> None:
    """Python's JSON makes halves of surrogates of an escape, and no message can hold one."""
    half = json.loads('"\\ud800"')
    assert judged(0, 0.0, {"reward": 1.0, half: 0.5}).components == (("?", 0.5),)
    assert kept(0, 0.0, (False, f"says {half}")).cause == "says ?"
    assert text_of(ValueError(f"no number: {half}")) == "no number: ?"
    assert end_of(0, End(detail=half), is_cut_off=False).detail == "?"
