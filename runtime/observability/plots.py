"""Which charts the report of a run has, drawn from its steps and the samples of its GPUs."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.evaluation.figures import REWARD_MEAN
from penstock.runtime.observability.charts import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    RED,
    SERIES_COLOURS,
    Line,
    bar_chart,
    line_chart,
)
from penstock.runtime.observability.figures import LOGPROB_DIFF, REWARD, REWARD_COMPONENT
from penstock.runtime.observability.summary import trained_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.nvml import GpuRow
    from penstock.runtime.observability.trackers import StepRow

SMOOTHED_STEPS: Final = 10
MAX_COMPONENTS: Final = 8
"""Of rewards, in one chart."""
_SPARK_WIDTH: Final = 160
_SPARK_HEIGHT: Final = 26
_SPARK_POINTS: Final = 80


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One chart with its title and the sentence below it."""

    title: str
    note: str
    svg: str


class FigureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One reported figure over the steps."""

    name: str
    first: float
    last: float
    smallest: float
    largest: float
    spark: str
    """An SVG of its course."""


class EvaluationTableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset, as it was evaluated last."""

    dataset: str
    version: int
    figures: dict[str, float]

    @property
    def passes(self) -> str:
        """pass@k, for each k."""
        return ", ".join(f"{name} {100 * value:.1f} %" for name, value in self.figures.items() if name[:5] == "pass@")


def learning_charts(steps: Sequence[StepRow]) -> list[Chart]:
    """Reward and response lengths."""
    charts: list[Chart] = []
    x, rewards = _series(steps, REWARD)
    if x:
        lines = [
            Line(label="step", x=x, y=rewards, colour=BLUE, width=0.9, alpha=0.5),
            Line(label=f"mean of {SMOOTHED_STEPS} steps", x=x, y=trailing_mean(rewards, SMOOTHED_STEPS), width=2.0),
        ]
        svg = line_chart("reward", lines, x_label="step", y_label="mean reward of the batch")
        charts.append(Chart(title="Reward", note="Before any normalisation, over every sample of a batch.", svg=svg))
    charts += _component_charts(steps)
    sized = [row for row in steps if row.response_lengths]
    if sized:
        x = [float(row.version) for row in sized]
        lines = [
            Line(label="longest", x=x, y=[max(row.response_lengths) for row in sized], colour=MUTED, width=0.9),
            Line(label="90 % below", x=x, y=[_quantile(row.response_lengths, 0.9) for row in sized], colour=ORANGE),
            Line(
                label="mean", x=x, y=[statistics.fmean(row.response_lengths) for row in sized], colour=BLUE, width=2.0
            ),
        ]
        svg = line_chart("lengths", lines, x_label="step", y_label="response tokens", y_from_zero=True)
        charts.append(Chart(title="Response length", note="Of the samples that were trained.", svg=svg))
    return charts


def _component_charts(steps: Sequence[StepRow]) -> list[Chart]:
    names = sorted({name for row in steps for name in row.metrics if name.startswith(REWARD_COMPONENT)})
    if not names:
        return []
    lines: list[Line] = []
    for place, name in enumerate(names[:MAX_COMPONENTS]):
        x, values = _series(steps, name)
        label, colour = name.removeprefix(REWARD_COMPONENT), SERIES_COLOURS[place % len(SERIES_COLOURS)]
        lines.append(Line(label=label, x=x, y=trailing_mean(values, SMOOTHED_STEPS), colour=colour))
    left = f" The first {MAX_COMPONENTS} of {len(names)}." if len(names) > MAX_COMPONENTS else ""
    y_label = "mean of the batch" if len(lines) > 1 else lines[0].label  # one line has no legend
    svg = line_chart("components", lines, x_label="step", y_label=y_label)
    note = f"What the reward function names beside the reward, the mean of {SMOOTHED_STEPS} steps.{left}"
    return [Chart(title="Components of the reward", note=note, svg=svg)]


def staleness_charts(steps: Sequence[StepRow], bound: int | None) -> list[Chart]:
    """Ages as a histogram over the run, and over the steps."""
    counts: list[int] = []
    for row in steps:
        counts.extend([0] * (len(row.staleness_counts) - len(counts)))
        for age, count in enumerate(row.staleness_counts):
            counts[age] += count
    num_samples = sum(counts)
    if not num_samples:
        return []
    shares = [100 * count / num_samples for count in counts]
    histogram = bar_chart(
        "ages", shares, x_label="age in versions when trained", y_label="share of the samples, %", bound=bound
    )
    aged = [row for row in steps if sum(row.staleness_counts)]
    x = [float(row.version) for row in aged]
    lines = [
        Line(label="oldest", x=x, y=[_oldest(row) for row in aged], colour=MUTED, width=1.0, steps=True),
        Line(label="mean", x=x, y=[_mean_age(row) for row in aged], colour=BLUE, width=2.0),
    ]
    if bound is not None:
        lines.append(Line(label="bound", x=[x[0], x[-1]], y=[bound, bound], colour=RED, width=1.2, dashed=True))
    over_time = line_chart(
        "staleness", lines, x_label="step", y_label="age in versions", y_from_zero=True, whole_y=True
    )
    mean_age = sum(age * count for age, count in enumerate(counts)) / num_samples
    note = f"{num_samples:,} trained samples, mean age {mean_age:.2f} versions."
    return [
        Chart(title="Staleness", note=note, svg=histogram),
        Chart(
            title="Staleness over time",
            note="Age of the oldest token that is trained; time in queues counts.",
            svg=over_time,
        ),
    ]


def speed_charts(steps: Sequence[StepRow]) -> list[Chart]:
    """Tokens a second, and the difference between learner and engine."""
    charts: list[Chart] = []
    if len(steps) > 1:
        x = [float(row.version) for row in steps[1:]]
        lines = [Line(label="trained", x=x, y=_rates(steps, lambda row: trained_tokens(row.balance)), width=2.0)]
        if any(_ended_tokens(row) > trained_tokens(row.balance) for row in steps):
            finished = Line(label="finished", x=x, y=_rates(steps, _ended_tokens), colour=GREEN, width=1.2)
            lines.append(finished)
        svg = line_chart("throughput", lines, x_label="step", y_label="tokens a second", y_from_zero=True)
        note = f"Response tokens of samples that were trained, or ended in any way; mean of {SMOOTHED_STEPS} steps."
        charts.append(Chart(title="Throughput", note=note, svg=svg))
    x, diffs = _series(steps, LOGPROB_DIFF)
    if x:
        lines = [Line(label="", x=x, y=diffs, colour=ORANGE)]
        svg = line_chart("logprobs", lines, x_label="step", y_label="mean |difference| in nats", y_from_zero=True)
        note = "Log-probability of the sampled tokens: learner against engine. Older weights count into it."
        charts.append(Chart(title="Training against inference", note=note, svg=svg))
    return charts


def evaluation_charts(evaluations: Sequence[EvaluationRow]) -> list[Chart]:
    """Mean reward and pass@k of each dataset over the versions that were evaluated."""
    courses: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in evaluations:
        for dataset, figures in row.datasets().items():
            course = courses.setdefault(dataset, {})
            for name, value in figures.items():
                if name == REWARD_MEAN or name.startswith("pass@"):
                    course.setdefault(name, []).append((float(row.version), value))
    charts: list[Chart] = []
    for number, (dataset, course) in enumerate(courses.items()):
        lines = [
            Line(
                label="mean reward" if name == REWARD_MEAN else name,
                x=[x for x, _ in points],
                y=[y for _, y in points],
                colour=SERIES_COLOURS[place % len(SERIES_COLOURS)],
                dashed=name == REWARD_MEAN and len(course) > 1,
                marked=True,
            )
            for place, (name, points) in enumerate(course.items())
        ]
        if not lines:
            continue
        svg = line_chart(f"evaluation-{number}", lines, x_label="version", y_label="mean reward, pass@k")
        charts.append(Chart(title=dataset, note=_evaluation_note(evaluations, dataset), svg=svg))
    return charts


def _evaluation_note(evaluations: Sequence[EvaluationRow], dataset: str) -> str:
    """How much the last evaluation of a dataset asked, and which weights answered."""
    row = next(row for row in reversed(evaluations) if dataset in row.datasets())
    figures = row.datasets()[dataset]
    answers = f"Last: {figures['num_answers']:,.0f} answers to {figures['num_prompts']:,.0f} prompts"
    if figures.get("missing"):
        answers += f", {100 * figures['missing']:.1f} % missing"
    oldest, newest = figures.get("version/oldest"), figures.get("version/newest")
    if oldest is None or newest is None:
        return f"{answers}."
    versions = f"version {oldest:.0f}" if oldest == newest else f"versions {oldest:.0f} to {newest:.0f}"
    return f"{answers}, asked of version {row.version}, answered by {versions}."


def evaluation_table(evaluations: Sequence[EvaluationRow]) -> list[EvaluationTableRow]:
    """The last evaluation of each dataset."""
    last: dict[str, EvaluationTableRow] = {}
    for row in evaluations:
        for dataset, figures in row.datasets().items():
            last[dataset] = EvaluationTableRow(dataset=dataset, version=row.version, figures=figures)
    return list(last.values())


def gpu_charts(gpus: Mapping[int, Sequence[GpuRow]]) -> list[Chart]:
    """NVML's utilisation of each GPU over time; none without a GPU."""
    if not gpus:
        return []
    lines = [
        Line(
            label=f"GPU {gpu}",
            x=[row.at_s for row in rows],
            y=trailing_mean([_number(row.utilisation, 100) for row in rows], SMOOTHED_STEPS),
            colour=SERIES_COLOURS[place % len(SERIES_COLOURS)],
            width=1.2,
        )
        for place, (gpu, rows) in enumerate(sorted(gpus.items()))
    ]
    svg = line_chart("gpus", lines, x_label="seconds since the start", y_label="utilisation, %", y_from_zero=True)
    note = "What NVML calls utilisation: the share of time in which any kernel ran, however few slots it served."
    return [Chart(title="GPUs", note=note, svg=svg)]


def figure_rows(steps: Sequence[StepRow]) -> list[FigureRow]:
    """Every figure that the steps report, by name."""
    names = sorted({name for row in steps for name in row.metrics})
    rows: list[FigureRow] = []
    for name in names:
        _, values = _series(steps, name)
        if values:
            rows.append(
                FigureRow(
                    name=name,
                    first=values[0],
                    last=values[-1],
                    smallest=min(values),
                    largest=max(values),
                    spark=_spark(values),
                )
            )
    return rows


def trailing_mean(values: Sequence[float], width: int) -> list[float]:
    """At each place the mean of the last ``width`` finite values up to it; not a number where there is none."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        means.append(statistics.fmean(window) if window else math.nan)
    return means


def _series(steps: Sequence[StepRow], name: str) -> tuple[list[float], list[float]]:
    points = [(float(row.version), value) for row in steps if (value := row.metrics.get(name)) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _number(value: float | None, scale: float) -> float:
    return math.nan if value is None else value * scale


def _quantile(values: Sequence[int], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _oldest(row: StepRow) -> int:
    return max(age for age, count in enumerate(row.staleness_counts) if count)


def _mean_age(row: StepRow) -> float:
    return sum(age * count for age, count in enumerate(row.staleness_counts)) / sum(row.staleness_counts)


def _ended_tokens(row: StepRow) -> int:
    return sum(count.num_tokens for count in row.balance.ended)


def _rates(steps: Sequence[StepRow], total: Callable[[StepRow], int]) -> list[float]:
    """Growth a second over up to ten steps, for each step but the first."""
    rates: list[float] = []
    for end in range(1, len(steps)):
        first, last = steps[max(0, end - SMOOTHED_STEPS)], steps[end]
        took_s = last.at_s - first.at_s
        rates.append((total(last) - total(first)) / took_s if took_s > 0 else math.nan)
    return rates


def _spark(values: Sequence[float]) -> str:
    size = max(1, math.ceil(len(values) / _SPARK_POINTS))
    points = [statistics.fmean(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(points), max(points)
    spread = high - low or 1.0
    step = (_SPARK_WIDTH - 4) / max(1, len(points) - 1)
    path = " ".join(
        f"{2 + place * step:.1f},{_SPARK_HEIGHT - 3 - (value - low) / spread * (_SPARK_HEIGHT - 6):.1f}"
        for place, value in enumerate(points)
    )
    return (
        f'<svg class="spark" width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" aria-hidden="true">'
        f'<polyline points="{path}"/></svg>'
    )
