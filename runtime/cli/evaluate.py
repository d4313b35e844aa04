"""``penstock evaluate``: a model on datasets, with the engines of a scenario and without training.

Invariants:

* It is a run of its own with ``run.only: evaluate``: same actors, same ledger, a folder that holds everything about it.
* What is evaluated is named by the command, else by the scenario; how by the command, else by the dataset, else by the
  block's defaults, else by the rest of the scenario.
* Nothing that would change the model before it is evaluated is left in the scenario.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace
from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.backends.evaluation.answers import FOLDER
from penstock.backends.evaluation.figures import REWARD_MEAN
from penstock.backends.learners.checkpoints.names import CHECKPOINTS, version_of
from penstock.runtime.cli.convert import model_folder
from penstock.runtime.cli.hub import fetched_model, with_hub
from penstock.runtime.cli.launch import check, drive, write_scenario
from penstock.runtime.cli.runs import SCENARIO_NAME, hold_run, make_run_folder
from penstock.runtime.errors import UserError
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.texts import NOTHING, number_text
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.load import overridden_source, scenario_from
from penstock.runtime.scenario.paths import MADE_DATA
from penstock.runtime.scenario.source import Place, Source, read_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Plain

PASS: Final = "pass@"
LABELS: Final = {
    REWARD_MEAN: "mean reward",
    "truncated": "truncated",
    "missing": "missing",
    "response_len/mean": "mean tokens",
    "response_len/max": "most tokens",
    "num_prompts": "prompts",
    "num_answers": "answers",
}
"""What figures are called here; others but pass@k and components are not shown."""
SHARES: Final = ("truncated", "missing")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_AT_LEAST: Final = re.compile(r"(?P<dataset>[^/=]+)/(?P<figure>[^=]+)=(?P<value>[^=]+)")
_SUFFIXES: Final = re.compile(r"(\.(jsonl|ndjson|json|parquet|pq|gz|zst))+$")


class Asked(NamedTuple):
    """What the command line says of the datasets."""

    data: Sequence[str] = ()
    """``PATH`` or ``NAME=PATH``; empty: those of the scenario."""
    only: Sequence[str] = ()
    """Names of the scenario's datasets; empty: all."""
    settings: Mapping[str, Plain] = {}
    """Of every dataset, over what it says itself; a key may name a block with a dot."""


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
        UserError: something that the user gave cannot be used. Nothing was started.
    """
    wanted = [parse_floor(text) for text in floors]
    model = fetched_model(model, console)
    folder = model_folder(model, version).expanduser().absolute()
    scenario = with_hub(evaluation_scenario(folder, model, scenario_file, overrides, asked), console)
    _check_floors(wanted, scenario)
    parent = Path(scenario.run.folder).expanduser().absolute()
    check(scenario, parent, console)
    run_folder = make_run_folder(parent, scenario.run.name)
    write_scenario(run_folder, scenario)
    version = version_of(folder.name)
    of_version = "" if version is None else f" (version {version})"
    console.print(f"evaluating {escape(str(folder))}{of_version}", soft_wrap=True)
    console.print(f"run folder: {escape(str(run_folder))}", soft_wrap=True)
    with hold_run(run_folder):
        exit_code = drive(run_folder, scenario, scenario_file or run_folder / SCENARIO_NAME, console)
    rows = read_evaluations(run_folder)
    if not rows:
        if not exit_code:
            raise UserError(f"{run_folder}: the run ended without an evaluation; logs/driver.log has its story")
        return exit_code
    return _tell(rows[-1], folder, run_folder, console, json_out=json_out, floors=wanted) or exit_code


def evaluation_scenario(
    folder: Path, named: Path, scenario_file: Path | None, overrides: Sequence[str], asked: Asked
) -> Scenario:
    """The scenario under which a model is evaluated.

    Args:
        folder: of the model, absolute.
        named: what the user has called it by.
        scenario_file: that the user gave; None: that of the model's run, or none at all.
        overrides: keys to set over it.
        asked: what the command line says of the datasets.

    Raises:
        UserError: it cannot be used, or there is nothing to evaluate on.
    """
    source = overridden_source(_source(folder, scenario_file), overrides)
    data = source.data
    _evaluates_only(data, folder, named)
    datasets = _datasets(data, asked)
    _block(data, "evaluation")["datasets"] = list(datasets)
    if "data" not in data:
        _block(data, "data")["path"] = datasets[0]["path"]  # where a dataset says nothing the block holds
    scenario = scenario_from(source)
    if scenario.engines.backend == "simulated":
        raise UserError(
            "the scenario is simulated: its engines have no model to evaluate; give another with --scenario"
        )
    return _without_training_data(scenario)


def _without_training_data(scenario: Scenario) -> Scenario:
    """The same evaluation, without a look at the rows that the model was trained on: they need not be here."""
    sets = sets_of(scenario)
    datasets = tuple(
        replace(
            dataset,
            prompt_key=each.data.prompt_key,
            label_key=each.data.label_key or "",
            metadata_keys=each.data.metadata_keys,
            metadata=each.data.metadata,
            chat_template=each.data.chat_template,
            template_arguments=each.data.template_arguments,
            system_prompt=each.data.system_prompt or "",
            tools_key=each.data.tools_key or "",
            multimodal_keys=each.data.multimodal_keys,
            skip_bad_rows=each.data.skip_bad_rows,
            max_prompt_tokens=each.data.max_prompt_tokens,
        )
        for dataset, each in zip(scenario.evaluation.datasets, sets, strict=True)
    )
    return replace(scenario, data=sets[0].data, evaluation=replace(scenario.evaluation, datasets=datasets))


def asked_settings(
    *, k: str | None, temperature: float | None, max_response_tokens: int | None, reward: str | None, **others: Plain
) -> dict[str, Plain]:
    """What options of the command say of every dataset; what was not given is left out.

    Raises:
        UserError: ``k`` is no list of numbers.
    """
    numbers: list[Plain] | None = None
    if k is not None:
        try:
            numbers = [int(part) for part in k.split(",")]
        except ValueError:
            raise UserError(f"--k {k}: expected whole numbers with commas, such as 1,8") from None
    if reward is not None and ".py:" in reward:
        reward = str(Path.cwd() / Path(reward).expanduser())
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
        UserError: it is none.
    """
    match = _AT_LEAST.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        return Floor(match["dataset"], match["figure"], float(match["value"]))
    except ValueError:
        raise UserError(f"--at-least {text}: expected DATASET/FIGURE=VALUE, such as gsm8k/pass@1=0.4") from None


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
    passes = sorted((name for name in every if name.startswith(PASS)), key=lambda name: int(name.removeprefix(PASS)))
    components = [name for name in every if name.startswith("components/")]
    return [REWARD_MEAN, *passes, *components, *(name for name in LABELS if name != REWARD_MEAN and name in every)]


def _cell(name: str, figures: Mapping[str, float]) -> str:
    value = figures.get(name)
    if value is None:
        return NOTHING
    if name.startswith(PASS) or name in SHARES:
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
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    console.print(result_table(row))
    console.print(f"answers: {escape(str(run_folder / FOLDER))}", soft_wrap=True)
    if json_out is not None:
        try:
            json_out.write_bytes(encoded)
        except OSError as error:
            raise UserError(f"--json {json_out}: cannot be written: {error}") from None
    missed = [text for floor in floors if (text := _missed(row, floor)) is not None]
    for text in missed:
        sys.stderr.write(terminal_lines(f"penstock: {text}\n"))
    return 1 if missed else 0


def _missed(row: EvaluationRow, floor: Floor) -> str | None:
    value = row.datasets().get(floor.dataset, {}).get(floor.figure)
    if value is not None and value >= floor.value:
        return None
    found = "there is no such figure" if value is None else f"{value:.4g}"
    return f"--at-least {floor.dataset}/{floor.figure}={floor.value:g}: {found}"


def _check_floors(floors: list[Floor], scenario: Scenario) -> None:
    names = [dataset.name for dataset in scenario.evaluation.datasets]
    for floor in floors:
        if floor.dataset not in names:
            raise UserError(f"--at-least: there is no dataset '{floor.dataset}'; there are {', '.join(names)}")


def _source(folder: Path, scenario_file: Path | None) -> Source:
    """What the scenario is made from: the file that was given, that of the model's run, or next to nothing."""
    if scenario_file is None:
        run = folder.parent.parent if folder.parent.name == CHECKPOINTS else None
        if run is not None and (run / SCENARIO_NAME).is_file():
            scenario_file = run / SCENARIO_NAME
    if scenario_file is not None:
        return read_source(scenario_file)
    return Source({}, {(): Place("the command line", Path.cwd())})


def _evaluates_only(data: dict[str, Plain], folder: Path, named: Path) -> None:
    """The model is this one as it is, and nothing is trained."""
    _block(data, "run").update(
        name=_run_name(named), only="evaluate", batches_from=None, num_groups=None, keep_samples=False
    )
    _block(data, "model").update(path=str(folder), make=None)
    data["teacher"] = None
    # What is said about training would be checked, and some of it opened: a critic, a filter of the user's.
    _block(data, "learner").update(warm_start=None, objective="grpo", num_updates=1, num_passes=1)
    _block(data, "sampling")["samples_per_group"] = 2
    data.pop("filter", None)
    engines = _block(data, "engines")
    if engines.get("backend") == "recorded":  # of a run that imitated or compared what rows hold
        engines["backend"] = "torch"
    if isinstance(rows := data.get("data"), dict):
        rows.pop("recorded", None)


def _datasets(data: dict[str, Plain], asked: Asked) -> list[dict[str, Plain]]:
    """What is evaluated, with what the command line says of all."""
    datasets: list[dict[str, Plain]] = []
    if asked.data:
        for text in asked.data:
            name, path = _named(text)
            datasets.append({"name": name, "path": path})
    else:
        given = _block(data, "evaluation").get("datasets")
        datasets = [dict(each) for each in given if isinstance(each, dict)] if isinstance(given, list) else []
        if not datasets:
            raise UserError(
                "nothing to evaluate on: name rows with --data, or a scenario with evaluation.datasets by --scenario"
            )
        names = [str(each.get("name")) for each in datasets]
        for name in asked.only:
            if name not in names:
                raise UserError(f"--dataset: there is no '{name}' in the scenario; there are {', '.join(names)}")
        datasets = [each for each in datasets if not asked.only or each.get("name") in asked.only]
    for each in datasets:
        for key, value in asked.settings.items():
            block, _, inner = key.partition(".")
            if inner:
                _block(each, block)[inner] = value
            else:
                each[key] = value
    return datasets


def _named(text: str) -> tuple[str, str]:
    """Name and absolute path of ``--data``; without a name it is that of the file."""
    head, separator, tail = text.partition("=")
    name, path = (head, tail) if separator and _NAME.fullmatch(head) else ("", text)
    if not path.startswith(MADE_DATA):
        path = str(Path.cwd() / Path(path).expanduser())
    if not name:
        stem = _SUFFIXES.sub("", Path(path.partition("@[")[0]).name)
        name = _NO_NAME.sub("-", stem).strip("-._")[:64]
    if not name:
        raise UserError(f"--data {text}: expected a path, or NAME=PATH")
    return name, path


def _run_name(named: Path) -> str:
    return f"evaluate-{_NO_NAME.sub('-', named.resolve().name).strip('-._')}"[:64].rstrip("-._")


def _block(data: dict[str, Plain], key: str) -> dict[str, Plain]:
    found = data.get(key)
    if isinstance(found, dict):
        return found
    block: dict[str, Plain] = {}
    data[key] = block
    return block
