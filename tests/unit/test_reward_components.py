"""What a reward function names beside the reward: figures of each step, and a chart."""

from __future__ import annotations

import actor_driver as drive
from msgspec.structs import replace

from penstock.actors.buffer.report import step_report
from penstock.messages.base import Metric
from penstock.messages.samples import Completed, Group, Reward
from penstock.messages.training import Balance, StepFinished
from penstock.runtime.observability.plots import learning_charts
from penstock.runtime.observability.trackers import StepRow


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
