"""Which charts the report of a run has, made of its steps, its evaluations and the samples of its GPUs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.evaluation.figures import REWARD_MEAN, SHARES_AT_K
from penstock.messages.samples import TerminalState
from penstock.runtime.observability.chart_plans import LEARNING, PLANS, SHOWN_OTHERWISE, SPEED, matches, short_name
from penstock.runtime.observability.charts import Chart, Line, line_of
from penstock.runtime.observability.evaluations import shares_at_k
from penstock.runtime.observability.figures import REWARD, REWARD_STD, STALENESS_BOUND
from penstock.runtime.observability.summary import generated_tokens, trained_tokens
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.runtime.observability.chart_plans import Plan
    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.nvml import GpuRow
    from penstock.runtime.observability.trackers import StepRow

RATE_STEPS: Final = 10
"""Over so many steps rates are taken."""
MAX_LINES: Final = 12
"""Most lines that one chart draws."""
_AS_WANTED: Final = (TerminalState.TRAINED, TerminalState.EVALUATED)


class FigureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One reported figure over the steps."""

    name: str
    first: float
    last: float
    smallest: float
    largest: float


class EvaluationTableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset, as it was evaluated last."""

    dataset: str
    version: int
    figures: dict[str, float]

    @property
    def passes(self) -> str:
        """pass@k and maj@k, for each k."""
        return ", ".join(shares_at_k(self.figures))


def planned_charts(steps: Sequence[StepRow], plans: Sequence[Plan]) -> list[Chart]:
    """A chart for each plan of which something was reported."""
    names = figure_names(steps)
    charts: list[Chart] = []
    for plan in plans:
        found = [name for pattern in plan.names for name in names if matches(name, pattern)]
        lines = [figure_line(steps, name, short_name(name, plan), plan.missing) for name in found[:MAX_LINES]]
        left = f" The first {MAX_LINES} of {len(found)}." if len(found) > MAX_LINES else ""
        charts += chart_of(plan.title, plan.note + left, lines, y_label=plan.y_label, from_zero=plan.from_zero)
    return charts


def other_charts(steps: Sequence[StepRow]) -> list[Chart]:
    """A chart for each figure that no other chart has, such as those of your hooks."""
    taken = [*SHOWN_OTHERWISE, *(pattern for plan in PLANS for pattern in plan.names)]
    names = (name for name in figure_names(steps) if not any(matches(name, pattern) for pattern in taken))
    return [chart for name in names for chart in chart_of(name, "", [figure_line(steps, name, name)])]


def learning_charts(steps: Sequence[StepRow]) -> list[Chart]:
    """Reward with its spread, response lengths, and what else says whether the model learns."""
    x = [float(row.version) for row in steps]
    spread = [row.metrics.get(REWARD_STD) for row in steps]
    rewards = line_of("mean", x, [row.metrics.get(REWARD) for row in steps], spread=spread)
    note = "Mean of the batch before any normalisation; the band is one standard deviation wide each way."
    charts = chart_of("Reward", note, [rewards])
    sized = [row for row in steps if row.response_lengths]
    x = [float(row.version) for row in sized]
    lines = [
        line_of("longest", x, [max(row.response_lengths) for row in sized]),
        line_of("90 % below", x, [_quantile(row.response_lengths, 0.9) for row in sized]),
        line_of("mean", x, [statistics.fmean(row.response_lengths) for row in sized]),
    ]
    charts += chart_of("Response length", "Of the samples that were trained.", lines, y_label="tokens", from_zero=True)
    return charts + planned_charts(steps, LEARNING)


def staleness_charts(steps: Sequence[StepRow], bound: int | None) -> list[Chart]:
    """Ages as a histogram over the run, and over the steps."""
    counts: Counter[int] = Counter()
    for row in steps:
        counts.update(dict(enumerate(row.staleness_counts)))
    num_samples = counts.total()
    if not num_samples:
        return []
    ages = range(max(max(age for age, count in counts.items() if count), bound or 0) + 1)
    shares = [100 * counts[age] / num_samples for age in ages]
    histogram = Chart(
        title="Staleness",
        note=f"{num_samples:,} trained samples, mean age {_mean_age(counts):.2f} versions"
        + ("." if bound is None else f"; the bound is {bound}."),
        lines=[line_of("share", list(ages), shares, is_smoothed=False)],
        x_label="age in versions when trained",
        y_label="share of the samples, %",
        from_zero=True,
        are_bars=True,
    )
    aged = [(row, Counter(dict(enumerate(row.staleness_counts)))) for row in steps if sum(row.staleness_counts)]
    x = [float(row.version) for row, _ in aged]
    lines = [
        line_of("oldest", x, [max(+ages_of) for _, ages_of in aged], style="steps", is_smoothed=False),
        line_of("mean", x, [_mean_age(ages_of) for _, ages_of in aged]),
    ]
    if bound is not None:
        bounds = [row.metrics.get(STALENESS_BOUND, bound) for row, _ in aged]
        lines.append(line_of("bound", x, bounds, style="dashed", is_smoothed=False))
    note = "Age of the oldest token that is trained; time in queues counts."
    return [histogram, *chart_of("Staleness over time", note, lines, y_label="age in versions", from_zero=True)]


def speed_charts(steps: Sequence[StepRow]) -> list[Chart]:
    """Tokens a second, goodput, and where the time of a step goes."""
    x = [float(row.version) for row in steps]
    trained, finished = (_rates(steps, total) for total in (_trained, _ended))
    rates = [line_of("trained", x[1:], trained, is_smoothed=False)]
    if finished != trained:
        rates.append(line_of("finished", x[1:], finished, is_smoothed=False))
    note = f"Tokens that the model made, of samples that were trained, or ended in any way; over {RATE_STEPS} steps."
    charts = chart_of("Throughput", note, rates, y_label="tokens a second", from_zero=True)
    generated = (generated_tokens(row.balance) for row in steps)
    shares = [_trained(row) / num if num else None for row, num in zip(steps, generated, strict=True)]
    goodput = [line_of("goodput", x, shares, is_smoothed=False)]
    charts += chart_of("Goodput", "Trained ÷ generated tokens, from the start of the run.", goodput, from_zero=True)
    return charts + planned_charts(steps, SPEED)


def _trained(row: StepRow) -> int:
    return trained_tokens(row.balance)


def _ended(row: StepRow) -> int:
    return sum(count.num_made_tokens for count in row.balance.ended)


def fate_charts(steps: Sequence[StepRow]) -> list[Chart]:
    """What became of the samples that ended between one step and the next, where they were not all trained."""
    ends = [{(each.state, each.cause): each.num_samples for each in row.balance.ended} for row in steps]
    before: list[dict[tuple[str, str], int]] = [{}, *ends]
    totals = [sum(now.values()) - sum(then.values()) for then, now in zip(before, ends, strict=False)]
    fates = sorted({fate for each in ends for fate in each if fate[0] not in _AS_WANTED})
    lines = [
        line_of(
            f"{state}: {cause}" if cause else state,
            [float(row.version) for row in steps],
            [
                (now.get((state, cause), 0) - then.get((state, cause), 0)) / total if total > 0 else None
                for then, now, total in zip(before, ends, totals, strict=False)
            ],
        )
        for state, cause in fates
    ]
    note = "Share of the samples that ended since the step before."
    return chart_of("Not trained", note, lines, from_zero=True)


def evaluation_charts(evaluations: Sequence[EvaluationRow]) -> list[Chart]:
    """Mean reward and pass@k of each dataset over the versions that were evaluated."""
    charts: list[Chart] = []
    for dataset, course in evaluation_courses(evaluations).items():
        lines = [
            line_of("mean reward" if name == REWARD_MEAN else name, x, y, style="points", is_smoothed=False)
            for name, (x, y) in course.items()
        ]
        charts += chart_of(dataset, _evaluation_note(evaluations, dataset), lines)
    return charts


def evaluation_courses(evaluations: Sequence[EvaluationRow]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Dataset → figure, mean reward, pass@k and maj@k → versions and values."""
    courses: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for row in evaluations:
        for dataset, figures in row.datasets().items():
            for name, value in figures.items():
                if name == REWARD_MEAN or name.startswith(SHARES_AT_K):
                    x, y = courses.setdefault(dataset, {}).setdefault(name, ([], []))
                    x.append(float(row.version))
                    y.append(value)
    return courses


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
    lines = [
        line_of(
            f"GPU {gpu}",
            [row.at_s for row in rows],
            [None if row.utilisation is None else 100 * row.utilisation for row in rows],
        )
        for gpu, rows in sorted(gpus.items())
    ]
    note = "What NVML calls utilisation: the share of time in which any kernel ran, however few slots it served."
    return chart_of("GPUs", note, lines, x_label="seconds since the start", y_label="%", from_zero=True)


def figure_rows(steps: Sequence[StepRow]) -> list[FigureRow]:
    """Every figure that the steps report, by name."""
    rows: list[FigureRow] = []
    for name in figure_names(steps):
        _, values = _series(steps, name)
        if values:
            rows.append(
                FigureRow(
                    name=name,
                    first=values[0],
                    last=values[-1],
                    smallest=min(values),
                    largest=max(values),
                )
            )
    return rows


def figure_names(steps: Sequence[StepRow]) -> list[str]:
    """Of every figure that the steps report, sorted."""
    return sorted({name for row in steps for name in row.metrics})


def _series(steps: Sequence[StepRow], name: str) -> tuple[list[float], list[float]]:
    points = [(float(row.version), value) for row in steps if (value := row.metrics.get(name)) is not None]
    return [x for x, _ in points], [y for _, y in points]


def figure_line(steps: Sequence[StepRow], name: str, label: str, missing: float | None = None) -> Line:
    """A reported figure over the steps; ``missing``: its value at a step that does not report it."""
    return line_of(label, [float(row.version) for row in steps], [row.metrics.get(name, missing) for row in steps])


def chart_of(
    title: str,
    note: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    y_label: str = "",
    from_zero: bool = False,
) -> list[Chart]:
    """A chart of the lines that have a point; none where none has."""
    drawn = [line for line in lines if any(value is not None for value in line.y)]
    if not drawn:
        return []
    return [
        Chart(title=terminal_text(title), note=note, lines=drawn, x_label=x_label, y_label=y_label, from_zero=from_zero)
    ]


def _quantile(values: Sequence[int], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _mean_age(counts: Counter[int]) -> float:
    return sum(age * count for age, count in counts.items()) / counts.total()


def _rates(steps: Sequence[StepRow], total: Callable[[StepRow], int]) -> list[float]:
    """Growth a second over up to :data:`RATE_STEPS` steps, for each step but the first."""
    rates: list[float] = []
    for end in range(1, len(steps)):
        first, last = steps[max(0, end - RATE_STEPS)], steps[end]
        took_s = last.at_s - first.at_s
        rates.append((total(last) - total(first)) / took_s if took_s > 0 else math.nan)
    return rates
