"""Penstock from Python, for scripts and notebooks.

```python
from penstock import train


def reward(response: str) -> float:
    return response.count("a") / max(1, len(response))


run = train(model="Qwen/Qwen3-0.6B", data=[{"prompt": "Write about bananas."}] * 64, reward=reward)
```

What ``penstock`` does on the command line is done here by the same code. A run lives in a process of its own, beside
the program, so nothing here touches the program's signals, threads or event loop; the run ends, cleanly, when the
program does. Whatever is wrong is an exception: :class:`UserFault` where something that was given has to be changed,
with a message that says what; :class:`RunFailedError` where a run has failed otherwise. Nothing is printed but a line
of progress on standard error, in a notebook a small picture in the cell; ``progress=False`` turns it off.

Arguments that mean the same everywhere:

* ``overrides``: keys of a scenario with plain values, ``{"staleness.max_staleness": 4}``. Relative paths in them start
  from the current folder.
* ``wait``: return when the run is over; False returns when its checks are done and it goes on. An interrupt while this
  waits stops the run, cleanly.
* ``progress``: show how far the run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from penstock.backends.ledger.audit import AuditReport
from penstock.messages.errors import RunFailedError, UserFault
from penstock.messages.option_keys import Names
from penstock.runtime.hosts.virtual.simulate_view import Result as SimulationResult
from penstock.runtime.launch.apart import EvaluateJob, LaunchJob, ResumeJob
from penstock.runtime.launch.evaluate import evaluation_name
from penstock.runtime.launch.handle import Run, begin, new_folder
from penstock.runtime.launch.inputs import Function, Rows, write_function, write_rows
from penstock.runtime.launch.runs import RECORD_NAME, audit_run, newest_run, read_record
from penstock.runtime.launch.status import RunStatus
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.samples import ShownSample as Sample
from penstock.runtime.observability.summary import RunSummary
from penstock.runtime.observability.traces import SpanRow
from penstock.runtime.observability.trackers import ActivityRow, StepRow
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.load import overridden_source, scenario_from
from penstock.runtime.scenario.modelled import modelled_from
from penstock.runtime.scenario.named import absolute
from penstock.runtime.scenario.shipped import find_scenario
from penstock.runtime.scenario.source import Place, Source, read_source

if TYPE_CHECKING:
    from penstock.runtime.scenario.source import Plain

__all__ = [
    "ActivityRow",
    "AuditReport",
    "EvaluationRow",
    "Run",
    "RunFailedError",
    "RunStatus",
    "RunSummary",
    "Sample",
    "Scenario",
    "SimulationResult",
    "SpanRow",
    "StepRow",
    "UserFault",
    "audit",
    "check",
    "evaluate",
    "list_runs",
    "load_scenario",
    "open_run",
    "resume",
    "run",
    "simulate",
    "train",
]

AnyScenario: TypeAlias = "str | Path | Mapping[str, object] | Scenario"
"""The name of one that comes with Penstock, a YAML file, its blocks as a mapping, or one that is loaded."""
Overrides: TypeAlias = "Mapping[str, object] | None"
AnyRun: TypeAlias = "Run | str | Path"
"""A run, or its folder."""

RUNS: Final = "runs"
TRAIN: Final = "local_model"
"""The scenario that :func:`train` begins with."""
TRAIN_KEYS: Final = {"run.name": "train", "runtime.host": "local", "sampling.max_response_tokens": 256}
"""What it sets in it, for a machine that may have no GPU."""


def load_scenario(scenario: AnyScenario, overrides: Overrides = None) -> Scenario:
    """Read, check and resolve a scenario.

    Args:
        scenario: relative paths in a file start from its folder, those in a mapping from the current one.
        overrides: keys to set over it; over a :class:`Scenario`, which is resolved already, they change no other key.

    Raises:
        UserFault: with file, line and key of the first thing that is wrong.
    """
    return scenario_from(_source(scenario, overrides))


def check(scenario: AnyScenario, overrides: Overrides = None) -> list[str]:
    """What a scenario needs and this machine lacks, as ``penstock run --dry-run`` says it: a sentence for each thing
    that is missing, none if a run can begin.

    Args:
        scenario: see :func:`load_scenario`.

    Raises:
        UserFault: the scenario itself cannot be used.
    """
    from penstock.runtime.launch.machine import FAILED, ask_machine

    resolved = load_scenario(scenario, overrides)
    outcomes = ask_machine(resolved, Path(resolved.run.folder).expanduser().absolute())
    return [outcome.removeprefix(f"{FAILED}: ") for outcome in outcomes.values() if outcome.startswith(FAILED)]


def run(scenario: AnyScenario, overrides: Overrides = None, *, wait: bool = True, progress: bool = True) -> Run:
    """Run a scenario, as ``penstock run``.

    Args:
        scenario: see :func:`load_scenario`.

    Raises:
        UserFault: something has to be changed. No folder is left of a run that did not begin.
        RunFailedError: the run has failed; it has the folder.
    """
    resolved = load_scenario(scenario, overrides)
    with new_folder(Path(resolved.run.folder), resolved.run.name) as folder:
        return begin(LaunchJob(scenario=resolved, folder=str(folder)), wait=wait, progress=progress)


def train(
    model: str | Path | Mapping[str, object],
    data: Rows,
    reward: Function,
    *,
    num_steps: int = 100,
    overrides: Overrides = None,
    wait: bool = True,
    progress: bool = True,
) -> Run:
    """Train a model on rows with a reward, on this machine, with embedded torch engines and actors forked here.

    It is the scenario ``local_model`` with what is given here, responses of at most 256 tokens, and any other key in
    ``overrides``: its engines may be SGLang servers (``engines.backend``), its actors Ray's (``runtime.host``).
    ``scenario`` of what is returned has all of it.

    Args:
        model: a folder, a name on the hub, or the block ``model`` of a scenario (``{"make": "s"}``: a small new one).
        data: what ``data.path`` takes (a file, a name on the hub), or rows: dictionaries with a ``prompt`` (a text, or
            chat messages, which the model's template renders), and as a rule a ``label``. A list or a
            ``datasets.Dataset``; they are written into the run's folder.
        reward: what ``reward.function`` takes (``math``, ``mine.py:reward``), or a function that asks for ``prompt``,
            ``response``, ``label``, ``metadata`` (the other columns) and what else docs/rewards.md names, or for
            ``responses``, those of a group. It runs in processes of its own, so its source is written into the run's
            folder, with the functions, classes, imports and plain values that it uses: of a lambda, a closure or a
            notebook's cell too. What it uses and cannot be written, such as an open client, is refused by name.
        num_steps: batches to train.

    Raises:
        UserFault: as :func:`run`; or the function cannot be written down.
        RunFailedError: as :func:`run`.
    """
    given: dict[str, object] = {**TRAIN_KEYS, "run.num_steps": num_steps}
    given |= {"model": model} if isinstance(model, Mapping) else {"model.path": model}
    wanted = dict(overrides or {})
    prompt_key, label_key = wanted.get("data.prompt_key", "prompt"), wanted.get("data.label_key", "label")
    with new_folder(Path(str(wanted.get("run.folder", RUNS))), str(wanted.get("run.name", "train"))) as folder:
        rows = write_rows(folder, "rows", data, prompt_key=str(prompt_key))
        function = write_function(folder, "reward", reward)
        given |= {"data.path": rows.path} | {f"data.{key}": value for key, value in rows.settings(label_key).items()}
        given |= {f"reward.{key}": value for key, value in function.settings().items()}
        if rows.columns is not None and "metadata" in function.arguments:
            given["data.metadata_keys"] = sorted(rows.columns - {prompt_key, label_key})
        job = LaunchJob(scenario=load_scenario(TRAIN, given | wanted), folder=str(folder))
        return begin(job, wait=wait, progress=progress)


def resume(run: AnyRun | None = None, overrides: Overrides = None, *, wait: bool = True, progress: bool = True) -> Run:
    """Go on with a run that was stopped, failed or was killed, as ``penstock resume``.

    Args:
        run: None: the newest one under ``./runs``.
        overrides: what changes from here on: ``run.num_steps``, ``engines.*`` and what else docs/resume.md names.

    Raises:
        UserFault: as :func:`run`; or the run is alive, or an override cannot change within a run.
        RunFailedError: as :func:`run`.
    """
    folder = open_run(run).folder
    return begin(ResumeJob(folder=str(folder), overrides=_texts(overrides)), wait=wait, progress=progress)


def evaluate(
    model: AnyRun,
    data: Rows | Mapping[str, Rows] | None = None,
    reward: Function | None = None,
    *,
    scenario: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    overrides: Overrides = None,
    version: int | None = None,
    wait: bool = True,
    progress: bool = True,
) -> Run:
    """Evaluate a model, as ``penstock evaluate``. Nothing is trained; ``evaluations()`` of what is returned has the
    figures.

    Args:
        model: a run, whose newest checkpoint is meant; a checkpoint; a folder or a name on the hub.
        data: rows, as :func:`train` takes them, or several by name, whose columns are as the scenario says; None: the
            datasets of the scenario.
        reward: as :func:`train` takes it; None: as the scenario says.
        scenario: a name or a file, that says with which engines, and how; None: that of the model's run.
        settings: of every dataset: ``{"samples_per_prompt": 8, "sampling.temperature": 0.6}``, docs/evaluation.md.
        version: of the checkpoint; None: the newest.

    Raises:
        UserFault: as :func:`run`; or there is no such model, or nothing to evaluate it on.
        RunFailedError: as :func:`run`.
    """
    named = str(model.folder if isinstance(model, Run) else model)
    with new_folder(Path(str((overrides or {}).get("run.folder", RUNS))), evaluation_name(Path(named))) as folder:
        texts, wanted = _named_rows(folder, data)
        if reward is not None:
            function = write_function(folder, "reward", reward)
            wanted |= {f"reward.{key}": value for key, value in function.settings().items()}
            wanted["reward.function"] = absolute(Names.REWARD, function.spec, Path.cwd())
        job = EvaluateJob(
            model=named,
            scenario_file=None if scenario is None else str(find_scenario(Path(scenario)).absolute()),
            overrides=_texts(overrides),
            version=version,
            data=texts,
            settings=cast("dict[str, Any]", _plain({**wanted, **(settings or {})})),
            folder=str(folder),
        )
        return begin(job, wait=wait, progress=progress)


def simulate(
    scenario: AnyScenario, overrides: Overrides = None, *, seed: int = 0, folder: str | Path | None = None
) -> SimulationResult:
    """Run the same actors on a virtual clock with modelled engines and learner, as ``penstock simulate``: hours in
    seconds, in this process.

    Args:
        scenario: see :func:`load_scenario`.
        seed: of latencies and faults; the same seed gives the same run.
        folder: where event log, metrics and report go; None writes nothing.

    Raises:
        UserFault: the scenario cannot be simulated, or the folder cannot be written.
    """
    resolved, _ = modelled_from(_source(scenario, overrides))
    if resolved.run.only is not None:
        raise UserFault(f"run.only: {resolved.run.only}: a part of a run is not simulated; remove it")
    from penstock.runtime.hosts.virtual.simulate import simulated

    return simulated(resolved, seed=seed, run_folder=None if folder is None else Path(folder))[0]


def audit(run: AnyRun | None = None) -> AuditReport:
    """Check that no sample or token of a run was lost or counted twice, from its ledger, as ``penstock audit``; also of
    a run that goes on. ``.is_clean`` says it in a word.

    Raises:
        UserFault: there is no such run, or its ledger cannot be read.
    """
    return audit_run(open_run(run).folder)


def open_run(run: AnyRun | None = None) -> Run:
    """The run of a folder, alive or over; None: the newest one under ``./runs``.

    Raises:
        UserFault: there is none.
    """
    return run if isinstance(run, Run) else Run(newest_run(Path(RUNS)) if run is None else run)


def list_runs(folder: str | Path = RUNS) -> list[Run]:
    """The runs of a folder, newest first.

    Raises:
        UserFault: one of them cannot be read.
    """
    found = [file.parent for file in Path(folder).expanduser().glob(f"*/{RECORD_NAME}")]
    return [Run(each) for each in sorted(found, key=lambda each: read_record(each).began_at, reverse=True)]


def _named_rows(folder: Path, data: Rows | Mapping[str, Rows] | None) -> tuple[tuple[str, ...], dict[str, object]]:
    """Rows to evaluate on, as the command line names them, and how they are read."""
    if data is None:
        return (), {}
    if isinstance(data, Mapping):
        every = cast("Mapping[str, Rows]", data)
        return tuple(f"{name}={write_rows(folder, name, rows).path}" for name, rows in every.items()), {}
    found = write_rows(folder, "rows", data)
    return (found.path,), {key: "" if value is None else value for key, value in found.settings().items()}


def _source(scenario: AnyScenario, overrides: Overrides) -> Source:
    here = Path.cwd()
    if isinstance(scenario, Scenario):
        source = Source(msgspec.to_builtins(scenario), {(): Place("the given scenario", here)})
    elif isinstance(scenario, Mapping):
        source = Source(cast("dict[str, Plain]", _plain(scenario)), {(): Place("the given mapping", here)})
    else:
        source = read_source(find_scenario(Path(scenario)))
    return overridden_source(source, _texts(overrides))


def _texts(overrides: Overrides) -> tuple[str, ...]:
    """As the command line takes them; what is JSON is YAML, too."""
    return tuple(f"{key}={msgspec.json.encode(_plain(value)).decode()}" for key, value in (overrides or {}).items())


def _plain(value: object) -> object:
    """Numbers, texts, lists and mappings, as a YAML file has them; paths as their texts.

    Raises:
        UserFault: there is something else in it.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_path))
    except (TypeError, ValueError) as error:
        raise UserFault(f"{value!r}: {error}; a scenario has numbers, texts, lists and mappings") from None


def _path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"found {type(value).__qualname__}")
