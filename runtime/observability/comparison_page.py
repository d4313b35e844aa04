"""``comparison.html``: runs on one page, with the tables of their comparison and a chart of each figure."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.texts import counted
from penstock.runtime.observability.chart_plans import PLANS, Plan, matches
from penstock.runtime.observability.charts import line_of
from penstock.runtime.observability.comparison_texts import arms_table, differences_tables, figures_tables
from penstock.runtime.observability.courses import Axis, Course, Points, placed, places
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.page import render_page, write_whole
from penstock.runtime.observability.plots import chart_of, evaluation_courses, figure_line, figure_names
from penstock.runtime.observability.report import fact_rows
from penstock.runtime.observability.texts import tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.charts import Chart, Line
    from penstock.runtime.observability.compared_runs import ComparedArm, ComparedRun
    from penstock.runtime.observability.comparison import Comparison

_REWARD: Final = Plan("Reward", (REWARD,), "Mean of the batch before any normalisation.")
_FIRST: Final = (
    Plan("Response length", ("rollout/response_len/mean",), "Mean of the trained samples.", "tokens", from_zero=True),
    Plan("Staleness", ("buffer/staleness_mean",), "Mean of the trained samples.", "age in versions", from_zero=True),
)
_X_LABELS: Final = {Axis.STEPS: "step", Axis.TOKENS: "generated tokens", Axis.WALL_TIME: "minutes of training"}
_OVER: Final = {Axis.STEPS: "", Axis.TOKENS: " over tokens", Axis.WALL_TIME: " over time"}
_X_SCALES: Final = {Axis.STEPS: 1.0, Axis.TOKENS: 1.0, Axis.WALL_TIME: 1 / 60}
_BAND: Final = "Of an arm of several runs the mean, as far as all of them came, with one standard deviation each way."


def write_comparison(arms: Sequence[ComparedArm], comparison: Comparison, path: Path) -> Path:
    """Write a page that compares runs; returns its path.

    Raises:
        OSError: the page cannot be written.
    """
    runs = [run for arm in arms for run in arm.runs]
    html = render_page(
        "comparison.html.j2",
        name=f"{counted(len(runs), 'run')} compared",
        runs=runs,
        facts=_rows([_facts(run) for run in runs]),
        cautions=comparison.cautions,
        method=comparison.method,
        arms=arms_table(comparison),
        differences=differences_tables(comparison),
        tables=figures_tables(comparison),
        main_charts=[chart for axis in Axis for chart in _axis_charts(arms, axis)],
        charts=_step_charts(arms),
        num_steps=max(len(run.steps) for run in runs),
    )
    return write_whole(path, html)


def _facts(run: ComparedRun) -> dict[str, str]:
    """What it was and what it came to, by label."""
    found = {tile.label: tile.value + f" ({tile.detail})" * bool(tile.detail) for tile in tiles(run.summary, run.steps)}
    found |= {} if run.summary is None else {"why it ended": run.summary.story}
    return found | dict(fact_rows(str(run.folder), run.starts, run.summary))


def _rows(runs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Each label of any run with the text of every run; empty where a run has none."""
    labels = dict.fromkeys(label for run in runs for label in run)
    return [(label, [run.get(label, "") for run in runs]) for label in labels]


def _step_charts(arms: Sequence[ComparedArm]) -> list[Chart]:
    """Each figure that runs report, with a line for each run in the colour of its arm."""
    runs = [run for arm in arms for run in arm.runs]
    charts: list[Chart] = []
    names = sorted({name for run in runs for name in figure_names(run.steps)})
    of_seeds = (_REWARD,) if any(len(arm.runs) > 1 for arm in arms) else ()
    for plan in (*of_seeds, *_FIRST, *PLANS):
        for name in (name for pattern in plan.names for name in names if matches(name, pattern)):
            lines = _of_runs(arms, partial(_figure_line, plan, name))
            title = f"{plan.title}: {name}"
            charts += chart_of(title, plan.note, lines, y_label=plan.y_label, from_zero=plan.from_zero)
    return charts


def _figure_line(plan: Plan, name: str, run: ComparedRun) -> Line:
    return figure_line(run.steps, name, run.name, plan.missing)


def _axis_charts(arms: Sequence[ComparedArm], axis: Axis) -> Iterator[Chart]:
    """Reward and evaluations over an axis; over time also how far the training was."""
    x_label = _X_LABELS[axis]
    lines = [line for place, arm in enumerate(arms) for line in _arm_lines(arm, axis, place)]
    note = _BAND if any(len(arm.runs) > 1 for arm in arms) else "Mean of the batch before any normalisation."
    yield from chart_of(f"Reward{_OVER[axis]}", note, lines, x_label=x_label)
    figures = dict.fromkeys(figure for arm in arms for run in arm.runs for figure in _evaluated(run))
    for figure in figures:
        lines = _of_runs(arms, partial(_evaluation_line, figure, axis))
        yield from chart_of(f"{figure}{_OVER[axis]}", "Evaluation, where its version was made.", lines, x_label=x_label)
    if axis is Axis.WALL_TIME:
        lines = _of_runs(arms, lambda run: _line(run.name, _placed(run, _versions(run), axis), is_smoothed=False))
        yield from chart_of("Steps over time", "Without starts.", lines, x_label=x_label)


def _arm_lines(arm: ComparedArm, axis: Axis, colour: int) -> list[Line]:
    """The reward of an arm's only run, or the mean of its runs with its spread."""
    rewards = [_placed(run, _reward(run), axis) for run in arm.runs]
    if len(rewards) == 1:
        line = _line(arm.runs[0].name, rewards[0])
        return [msgspec.structs.replace(line, colour=colour)]
    if not all(points.x for points in rewards):
        return []
    low, high = max(points.x[0] for points in rewards), min(points.x[-1] for points in rewards)
    size = min(sum(low <= x <= high for x in points.x) for points in rewards)
    if size < 2:
        return []
    grid = [low + (high - low) * place / (size - 1) for place in range(size)]
    values = [[value for points in rewards if (value := points.at(min(x, high))) is not None] for x in grid]
    label = f"arm {arm.name}, mean of {counted(len(rewards), 'run')}"
    means, spread = [statistics.fmean(each) for each in values], [statistics.stdev(each) for each in values]
    return [msgspec.structs.replace(line_of(label, grid, means, spread=spread), colour=colour)]


def _of_runs(arms: Sequence[ComparedArm], line_of_run: Callable[[ComparedRun], Line]) -> list[Line]:
    """One line for each run: an arm has the same colour in every chart."""
    return [
        msgspec.structs.replace(line_of_run(run), colour=place) for place, arm in enumerate(arms) for run in arm.runs
    ]


def _reward(run: ComparedRun) -> Course:
    found = [(row.version, value) for row in run.steps if (value := row.metrics.get(REWARD)) is not None]
    return Course([version for version, _ in found], [value for _, value in found])


def _versions(run: ComparedRun) -> Course:
    return Course([row.version for row in run.steps], [float(row.version) for row in run.steps])


def _evaluated(run: ComparedRun) -> dict[str, Course]:
    return {
        f"{dataset}: {name}": Course([int(version) for version in x], y)
        for dataset, found in evaluation_courses(run.evaluations).items()
        for name, (x, y) in found.items()
    }


def _placed(run: ComparedRun, course: Course, axis: Axis) -> Points:
    points = placed(course, places(run.steps, axis))
    return Points([x * _X_SCALES[axis] for x in points.x], points.y)


def _evaluation_line(figure: str, axis: Axis, run: ComparedRun) -> Line:
    found = _placed(run, _evaluated(run).get(figure, Course([], [])), axis)
    return line_of(run.name, found.x, found.y, style="points", is_smoothed=False)


def _line(label: str, points: Points, *, is_smoothed: bool = True) -> Line:
    return line_of(label, points.x, points.y, is_smoothed=is_smoothed)
