"""A model on datasets, with the engines of a scenario and without training.

Invariants:

* It is a run of its own with ``run.only: evaluate``: same actors, same ledger, a folder that holds everything about it.
* What is evaluated is named by the command, else by the scenario; how by the command, else by the dataset, else by the
  block's defaults, else by the rest of the scenario.
* Nothing that would change the model before it is evaluated is left in the scenario.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace
from rich.markup import escape

from penstock.backends.checkpoint.hf_config import CONFIG_FILE
from penstock.backends.engines.spec import are_modelled, engines_that
from penstock.backends.learners.checkpoints.names import CHECKPOINTS, version_of
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault
from penstock.runtime.launch.hub import fetched_model
from penstock.runtime.launch.launch import launch
from penstock.runtime.launch.runs import SCENARIO_NAME, model_folder
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.load import overridden_source, scenario_from
from penstock.runtime.scenario.named import MADE_DATA
from penstock.runtime.scenario.source import Place, Source, read_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from penstock.runtime.launch.launch import Ended
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Plain

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_SUFFIXES: Final = re.compile(r"(\.(jsonl|ndjson|json|parquet|pq|gz|zst))+$")


class Asked(NamedTuple):
    """What the command line says of the datasets."""

    data: Sequence[str] = ()
    """``PATH`` or ``NAME=PATH``; empty: those of the scenario."""
    only: Sequence[str] = ()
    """Names of the scenario's datasets; empty: all."""
    settings: Mapping[str, Plain] = {}
    """Of every dataset, over what it says itself; a key may name a block with a dot."""


class Evaluation(NamedTuple):
    """What is to be evaluated."""

    model: Path
    """Absolute path of the model's folder."""
    scenario: Scenario
    origin: Path | None
    """The file that the scenario came from, where one was named."""


def plan_evaluation(
    model: Path,
    scenario_file: Path | None,
    overrides: Sequence[str],
    console: Console,
    *,
    asked: Asked,
    version: int | None = None,
) -> Evaluation:
    """Find the model, and the scenario under which it is evaluated.

    Raises:
        UserFault: there is no such model, or nothing to evaluate it on.
    """
    model = fetched_model(model, console)
    folder = model_folder(model, version).expanduser().absolute()
    if not (folder / CONFIG_FILE).is_file():
        raise UserFault(f"{folder}: no {CONFIG_FILE} there; expected the folder of a run, a checkpoint or a model")
    return Evaluation(folder, evaluation_scenario(folder, model, scenario_file, overrides, asked), scenario_file)


def evaluate(plan: Evaluation, console: Console, *, folder: Path | None = None) -> Ended:
    """Evaluate; ``folder`` as :func:`~penstock.runtime.launch.launch.launch` takes it.

    Raises:
        UserFault: something that the user gave cannot be used. Nothing was started.
    """
    version = version_of(plan.model.name)
    of_version = "" if version is None else f" (version {version})"
    console.print(f"evaluating {escape(str(plan.model))}{of_version}", soft_wrap=True)
    ended = launch(plan.scenario, plan.origin, console, folder=folder)
    if not ended.exit_code and not read_evaluations(ended.folder):
        raise UserFault(f"{ended.folder}: the run ended without an evaluation; logs/driver.log has its story")
    return ended


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
        UserFault: it cannot be used, or there is nothing to evaluate on.
    """
    source = overridden_source(_source(folder, scenario_file), overrides)
    data = source.data
    _evaluates_only(data, folder, named)
    datasets = _datasets(data, asked)
    _block(data, "evaluation")["datasets"] = list(datasets)
    if "data" not in data:
        _block(data, "data")["path"] = datasets[0]["path"]  # where a dataset says nothing the block holds
    scenario = scenario_from(source)
    if are_modelled(scenario.engines):
        raise UserFault(
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
        name=evaluation_name(named), only="evaluate", batches_from=None, num_groups=None, keep_samples=False
    )
    _block(data, "model").update(path=str(folder), make=None)
    data["teacher"] = None
    # What is said about training would be checked, and some of it opened: a critic, a filter of the user's.
    _block(data, "learner").update(warm_start=None, objective="grpo", num_updates=1, num_passes=1)
    _block(data, "sampling")["samples_per_group"] = 2
    data.pop("filter", None)
    engines = _block(data, "engines")
    if engines.get("backend") in engines_that(Capability.FROM_ROWS):  # of a run that imitated or compared those
        del engines["backend"]
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
            raise UserFault(
                "nothing to evaluate on: name rows with --data (in Python, data=), or a scenario with "
                "evaluation.datasets by --scenario"
            )
        names = [str(each.get("name")) for each in datasets]
        for name in asked.only:
            if name not in names:
                raise UserFault(f"--dataset: there is no '{name}' in the scenario; there are {', '.join(names)}")
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
        raise UserFault(f"--data {text}: expected a path, or NAME=PATH")
    return name, path


def evaluation_name(named: Path) -> str:
    """Of the run that evaluates what the user has called so."""
    return f"evaluate-{_NO_NAME.sub('-', named.resolve().name).strip('-._')}"[:64].rstrip("-._")


def _block(data: dict[str, Plain], key: str) -> dict[str, Plain]:
    found = data.get(key)
    if isinstance(found, dict):
        return found
    block: dict[str, Plain] = {}
    data[key] = block
    return block
