"""``penstock evaluate``: what the command line says of an evaluation, and how its figures are shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.backends.evaluation.figures import REWARD_MEAN, SHARES_AT_K
from penstock.backends.learners.checkpoints.names import version_of
from penstock.backends.ledger.evaluation_answers import FOLDER
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import Names
from penstock.runtime.cli.ending import tell_end
from penstock.runtime.launch.evaluate import evaluate as run_evaluation
from penstock.runtime.launch.evaluate import plan_evaluation
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.texts import NOTHING, number_text
from penstock.runtime.output_file import write_output
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario.named import absolute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from penstock.runtime.launch.evaluate import Asked
    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Plain

LABELS: Final = {
    REWARD_MEAN: "mean reward",
    "truncated": "truncated",
    "missing": "missing",
    "response_len/mean": "mean tokens",
    "response_len/max": "most tokens",
    "num_prompts": "prompts",
    "num_answers": "answers",
}
"""What figures are called here; others but pass@k, maj@k and components are not shown."""
SHARES: Final = ("truncated", "missing")
_AT_LEAST: Final = re.compile(r"(?P<dataset>[^/=]+)/(?P<figure>[^=]+)=(?P<value>[^=]+)")

_FIGURE: Final = re.compile(
    r"reward_(mean|stderr)|(pass|maj)@\d+|components/.+|truncated|missing|(response_len|version|num)[/_].+"
)


class Floor(NamedTuple):
    """A figure that is to be reached."""

    dataset: str
    figure: str
    value: float


def evaluate(
    model: Path,
    scenario_file: Path | None,
    overrides: Sequence[str],
    console: Console,
    *,
    asked: Asked,
    version: int | None = None,
    json_out: Path | None = None,
    floors: Sequence[str] = (),
) -> int:
    """Evaluate a model; the exit code: 0, or 1 when the evaluation failed or a floor was not reached.

    Raises:
        UserFault: something that the user gave cannot be used. Nothing was started.
    """
    wanted = [parse_floor(text) for text in floors]
    plan = plan_evaluation(model, scenario_file, overrides, console, asked=asked, version=version)
    _check_floors(wanted, plan.scenario)
    ended = run_evaluation(plan, console)
    tell_end(ended)
    rows = read_evaluations(ended.folder)
    if not rows:
        return ended.exit_code
    return _tell(rows[-1], plan.model, ended.folder, console, json_out=json_out, floors=wanted) or ended.exit_code


def asked_settings(
    *, k: str | None, temperature: float | None, max_response_tokens: int | None, reward: str | None, **others: Plain
) -> dict[str, Plain]:
    """What options of the command say of every dataset; what was not given is left out.

    Raises:
        UserFault: ``k`` is no list of numbers.
    """
    numbers: list[Plain] | None = None
    if k is not None:
        try:
            numbers = [int(part) for part in k.split(",")]
        except ValueError:
            raise UserFault(f"--k {k}: expected whole numbers with commas, such as 1,8") from None
    if reward is not None:
        reward = absolute(Names.REWARD, reward, Path.cwd())
    given: dict[str, Plain] = {
        **others,
        "k": numbers,
        "sampling.temperature": temperature,
        "sampling.max_response_tokens": max_response_tokens,
        "reward.function": reward,
    }
    return {key: value for key, value in given.items() if value is not None}


def parse_floor(text: str) -> Floor:
    """``gsm8k/pass@1=0.4``

    Raises:
        UserFault: it is none.
    """
    match = _AT_LEAST.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        return Floor(match["dataset"], match["figure"], float(match["value"]))
    except ValueError:
        raise UserFault(f"--at-least {text}: expected DATASET/FIGURE=VALUE, such as gsm8k/pass@1=0.4") from None


def result_table(row: EvaluationRow) -> Table:
    """The figures, a column for each dataset."""
    figures_of = row.datasets()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for dataset in figures_of:
        table.add_column(escape(dataset), justify="right")
    for name in _names(figures_of):
        cells = [_cell(name, figures) for figures in figures_of.values()]
        style = "bold" if name == REWARD_MEAN else ""
        table.add_row(LABELS.get(name, name), *cells, style=style)
    return table


def _names(figures_of: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The figures that are shown, in their order: those of any dataset."""
    every = dict.fromkeys(name for figures in figures_of.values() for name in figures)
    passes = sorted((name for name in every if name.startswith(SHARES_AT_K)), key=_kind_and_k)
    components = [name for name in every if name.startswith("components/")]
    return [REWARD_MEAN, *passes, *components, *(name for name in LABELS if name != REWARD_MEAN and name in every)]


def _kind_and_k(name: str) -> tuple[int, int]:
    """Of ``pass@8``, to sort by."""
    kind, at, k = name.partition("@")
    return SHARES_AT_K.index(kind + at), int(k)


def _cell(name: str, figures: Mapping[str, float]) -> str:
    value = figures.get(name)
    if value is None:
        return NOTHING
    if name.startswith(SHARES_AT_K) or name in SHARES:
        return f"{100 * value:.1f} %"
    if name == REWARD_MEAN and "reward_stderr" in figures:
        return f"{number_text(value, 3)} ± {number_text(figures['reward_stderr'], 2)}"
    return number_text(value)


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` writes."""

    model: str
    version: int | None
    """Of the checkpoint; None where the model is none of a run."""
    run: str
    """Folder."""
    datasets: dict[str, dict[str, float]]
    """Name → figure → value."""


def _tell(
    row: EvaluationRow, folder: Path, run_folder: Path, console: Console, *, json_out: Path | None, floors: list[Floor]
) -> int:
    result = _Result(model=str(folder), version=version_of(folder.name), run=str(run_folder), datasets=row.datasets())
    encoded = f"{msgspec.json.format(msgspec.json.encode(result), indent=2).decode()}\n"
    console.print(result_table(row))
    console.print(f"answers: {escape(str(run_folder / FOLDER))}", soft_wrap=True)
    if json_out is not None:
        write_output(json_out, encoded)
    missed = [text for floor in floors if (text := _missed(row, floor)) is not None]
    for text in missed:
        sys.stderr.write(terminal_lines(f"penstock: {text}\n"))
    return 1 if missed else 0


def _missed(row: EvaluationRow, floor: Floor) -> str | None:
    value = row.datasets().get(floor.dataset, {}).get(floor.figure)
    if value is not None and value >= floor.value:
        return None
    known = ", ".join(row.datasets().get(floor.dataset, {}))
    found = f"there is no such figure; there are {known}" if value is None else f"{value:.4g}"
    return f"--at-least {floor.dataset}/{floor.figure}={floor.value:g}: {found}"


def _check_floors(floors: list[Floor], scenario: Scenario) -> None:
    names = [dataset.name for dataset in scenario.evaluation.datasets]
    for floor in floors:
        if floor.dataset not in names:
            raise UserFault(f"--at-least: there is no dataset '{floor.dataset}'; there are {', '.join(names)}")
        if not _FIGURE.fullmatch(floor.figure):
            raise UserFault(
                f"--at-least: there is no figure '{floor.figure}'; there are {REWARD_MEAN}, pass@K and maj@K for a K "
                "of --k, components/NAME, truncated, missing, response_len/mean and response_len/max"
            )
