"""What a run writes and says about its evaluations.

Invariants:

* An evaluation stands in ``metrics.jsonl`` once, under the version that it asked for, however often it is reported.
* A line of an evaluation begins with its number; that is how readers tell it from a step's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.evaluation.figures import (
    REWARD_MEAN,
    SHARES_AT_K,
    VERSIONS,
    Answer,
    Answered,
    figures_of,
    metric_name,
)
from penstock.runtime.observability.jsonl import read_rows
from penstock.runtime.observability.trackers import METRICS_FILE, is_evaluation_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.evaluation.sets import EvaluationSet
    from penstock.messages.base import Metric
    from penstock.messages.evaluation import EvaluatedDataset, EvaluationFinished

TRUNCATED: Final = "truncated"
_PREFIX: Final = "eval/"


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation, as it stands in ``metrics.jsonl``."""

    evaluation: int
    """Its number, from 0. (First, so that a line says at once what it is.)"""
    version: int
    """Policy version that the evaluation asked for."""
    at_s: float
    """When it was reported, in seconds since the start of the run."""
    is_pinned: bool = False
    """All answers are by that version."""
    metrics: dict[str, float]
    """``eval/DATASET/FIGURE``"""

    def datasets(self) -> dict[str, dict[str, float]]:
        """Name of a dataset → its figures by their short names."""
        found: dict[str, dict[str, float]] = {}
        for name, value in self.metrics.items():
            dataset, _, figure = name.removeprefix(_PREFIX).partition("/")
            found.setdefault(dataset, {})[figure] = value
        return found


class DatasetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a dataset went over the run: its first and its last evaluation, for the summary."""

    name: str
    first: float
    """Mean reward, here and below."""
    first_version: int
    last: float
    last_version: int


def dataset_figures(dataset: EvaluatedDataset, each: EvaluationSet) -> tuple[Metric, ...]:
    """The figures of one dataset that has been evaluated."""
    prompts = [
        Answered(
            row.row,
            tuple(
                Answer(
                    reward=sample.reward,
                    num_tokens=sample.num_tokens - sample.num_given_tokens,
                    is_truncated=sample.outcome == TRUNCATED,
                    spans=sample.spans,
                    components=sample.components,
                    extracted=sample.answer,
                )
                for sample in row.samples
            ),
        )
        for row in dataset.rows
    ]
    return figures_of(
        prompts,
        num_expected=len(dataset.rows) * dataset.samples_per_prompt,
        k=each.k,
        pass_reward=each.pass_reward,
    )


def evaluation_row(
    finished: EvaluationFinished, sets: Sequence[EvaluationSet], at_s: float, *, first_version: int = 0
) -> EvaluationRow:
    """The row of an evaluation that was reported; ``first_version``: of the weights that the run begins with."""
    by_name = {each.name: each for each in sets}
    metrics = {
        metric_name(dataset.name, figure.name): figure.value + first_version * (figure.name in VERSIONS)
        for dataset in finished.datasets
        for figure in dataset_figures(dataset, by_name[dataset.name])
    }
    return EvaluationRow(
        evaluation=finished.number,
        version=finished.version + first_version,
        at_s=at_s,
        is_pinned=finished.is_pinned,
        metrics=metrics,
    )


def read_evaluations(run_folder: Path) -> list[EvaluationRow]:
    """The evaluations of a run by number; none if there were none.

    Raises:
        UserFault: the file is damaged.
    """
    path = run_folder / METRICS_FILE
    if not path.exists():
        return []
    rows = {row.evaluation: row for row in read_rows(path, EvaluationRow, is_row=is_evaluation_line)}
    return [rows[number] for number in sorted(rows)]


def outcomes_of(rows: Sequence[EvaluationRow]) -> tuple[DatasetOutcome, ...]:
    """First and last mean reward of each dataset, in the order in which they are evaluated."""
    courses: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, figures in row.datasets().items():
            if REWARD_MEAN in figures:
                courses.setdefault(name, []).append((row.version, figures[REWARD_MEAN]))
    return tuple(
        DatasetOutcome(
            name=name,
            first=course[0][1],
            first_version=course[0][0],
            last=course[-1][1],
            last_version=course[-1][0],
        )
        for name, course in courses.items()
    )


def evaluation_text(row: EvaluationRow) -> str:
    """For the terminal: ``evaluation at version 20 · gsm8k reward 0.412 ± 0.021, pass@1 41.2 %, truncated 3 %``."""
    parts = [f"evaluation at version {row.version}"]
    parts += [f"{name} {figures_text(figures)}" for name, figures in row.datasets().items()]
    return " · ".join(parts)


def shares_at_k(figures: Mapping[str, float]) -> list[str]:
    """pass@k and maj@k of one dataset, for each k."""
    return [f"{name} {100 * value:.1f} %" for name, value in figures.items() if name.startswith(SHARES_AT_K)]


def figures_text(figures: Mapping[str, float]) -> str:
    """The figures of one dataset on one line, those that are worth a word."""
    if REWARD_MEAN not in figures:
        return "no answer"
    reward = f"reward {figures[REWARD_MEAN]:.3f}"
    if "reward_stderr" in figures:
        reward += f" ± {figures['reward_stderr']:.3f}"
    parts = [reward, *shares_at_k(figures)]
    parts += [f"{name} {100 * figures[name]:.1f} %" for name in ("truncated", "missing") if figures.get(name)]
    return ", ".join(parts)
