"""*Learning*: the report's charts of reward, its components, lengths, entropy, mismatch, staleness and evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.dashboard.book import book_of
from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.observability.chart_plans import AGREEMENT, OBJECTIVE
from penstock.runtime.observability.charts import Chart
from penstock.runtime.observability.facts import STARTS_FILE, read_starts
from penstock.runtime.observability.operations import marked, read_operations
from penstock.runtime.observability.plots import (
    evaluation_charts,
    fate_charts,
    learning_charts,
    other_charts,
    planned_charts,
    speed_charts,
    staleness_charts,
)
from penstock.runtime.observability.trackers import METRICS_FILE

if TYPE_CHECKING:
    from pathlib import Path


class ChartGroup(msgspec.Struct, frozen=True):
    """Charts under one heading."""

    title: str
    charts: list[Chart]


class Learning(msgspec.Struct, frozen=True):
    """All charts of a run that have something to show."""

    num_steps: int
    groups: list[ChartGroup]


def answer_learning(folder: Path, query: Query) -> Learning:
    """The charts of a run, as far as it is."""
    book = book_of(folder)
    steps, evaluations, starts = book.steps(), book.evaluations(), read_starts(folder)
    groups = {
        "Learning": learning_charts(steps),
        "Evaluation": evaluation_charts(evaluations),
        "Staleness": staleness_charts(steps, starts[-1].facts.staleness_bound if starts else None),
        "Engine against learner": planned_charts(steps, AGREEMENT),
        "Objective": planned_charts(steps, OBJECTIVE),
        "Speed": speed_charts(steps),
        "Fates": fate_charts(steps),
        "Other figures": other_charts(steps),
    }
    operations = read_operations(folder)
    return Learning(
        len(steps), [ChartGroup(title, marked(charts, operations)) for title, charts in groups.items() if charts]
    )


LEARNING: Final = View(
    name="learning",
    title="Learning",
    files=(METRICS_FILE, STARTS_FILE),
    routes=(Route(path="learning", query=Query, answer=answer_learning, is_shared=True),),
)
