"""``comparison.html``: several runs on one page, each figure with a line for each of them, and what told them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.runtime.observability.chart_plans import PLANS, Plan, matches
from penstock.runtime.observability.charts import line_of
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.facts import read_starts
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.page import render_page, write_page
from penstock.runtime.observability.plots import chart_of, evaluation_courses, figure_line, figure_names
from penstock.runtime.observability.report import SCENARIO_FILE, fact_rows
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.texts import tiles
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.scenario.keys import dotted, show
from penstock.runtime.scenario.source import read_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.charts import Chart, Line
    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.trackers import StepRow
    from penstock.runtime.scenario.source import KeyPath, Plain

_FIRST: Final = (
    Plan("Reward", (REWARD,), "Mean of the batch before any normalisation."),
    Plan("Response length", ("rollout/response_len/mean",), "Mean of the trained samples.", "tokens", from_zero=True),
    Plan("Staleness", ("buffer/staleness_mean",), "Mean of the trained samples.", "age in versions", from_zero=True),
)


class ComparedRun(NamedTuple):
    """What the comparison knows of a run."""

    name: str
    facts: dict[str, str]
    """What it was and what it came to, by label."""
    keys: dict[str, str]
    """Of its scenario, with their values as text."""
    steps: list[StepRow]
    evaluations: list[EvaluationRow]


def write_comparison(run_folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares runs, in the order in which they are named; returns its path.

    Raises:
        UserFault: a file of a run is missing or damaged; the message names it.
        OSError: the page cannot be written.
    """
    runs = [_read(folder) for folder in run_folders]
    html = render_page(
        "comparison.html.j2",
        name=f"{len(runs)} runs compared",
        runs=runs,
        facts=_rows([run.facts for run in runs]),
        keys=[row for row in _rows([run.keys for run in runs]) if len(set(row[1])) > 1],
        charts=[*_charts(runs), *_evaluation_charts(runs)],
        num_steps=max(len(run.steps) for run in runs),
    )
    return write_page(path, html)


def _read(folder: Path) -> ComparedRun:
    summary, steps = read_summary(folder), read_steps(folder)
    facts = {tile.label: tile.value + f" ({tile.detail})" * bool(tile.detail) for tile in tiles(summary, steps)}
    facts |= {} if summary is None else {"why it ended": summary.story}
    return ComparedRun(
        name=folder.name,
        facts=facts | dict(fact_rows(str(folder), read_starts(folder), summary)),
        keys=dict(_leaves(read_source(folder / SCENARIO_FILE).data, ())),
        steps=steps,
        evaluations=read_evaluations(folder),
    )


def _leaves(value: Plain, path: KeyPath) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield dotted(path), show(value)


def _rows(runs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Each label of any run with the text of every run; empty where a run has none."""
    labels = dict.fromkeys(label for run in runs for label in run)
    return [(label, [run.get(label, "") for run in runs]) for label in labels]


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    charts: list[Chart] = []
    names = sorted({name for run in runs for name in figure_names(run.steps)})
    for plan in (*_FIRST, *PLANS):
        for name in (name for pattern in plan.names for name in names if matches(name, pattern)):
            lines = _coloured(figure_line(run.steps, name, run.name, plan.missing) for run in runs)
            title = f"{plan.title}: {name}"
            charts += chart_of(title, plan.note, lines, y_label=plan.y_label, from_zero=plan.from_zero)
    minutes = _coloured(
        line_of(run.name, [row.training_s / 60 for row in run.steps], [row.metrics.get(REWARD) for row in run.steps])
        for run in runs
    )
    over_time = chart_of("Reward over time", "Without starts.", minutes, x_label="minutes of training")
    return [*charts[:1], *over_time, *charts[1:]]


def _evaluation_charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    courses = [evaluation_courses(run.evaluations) for run in runs]
    figures = dict.fromkeys((dataset, name) for course in courses for dataset in course for name in course[dataset])
    charts: list[Chart] = []
    for dataset, name in figures:
        found = (course.get(dataset, {}).get(name, ([], [])) for course in courses)
        lines = _coloured(
            line_of(run.name, x, y, style="points", is_smoothed=False) for run, (x, y) in zip(runs, found, strict=True)
        )
        charts += chart_of(f"{dataset}: {name}", "Evaluation.", lines)
    return charts


def _coloured(lines: Iterable[Line]) -> list[Line]:
    """One line for each run: a run has the same colour in every chart."""
    return [msgspec.structs.replace(line, colour=number) for number, line in enumerate(lines)]
