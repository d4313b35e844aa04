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
* ``models``: how long things take, as :func:`calibrate` returns or writes it; None: as the scenario has it.
* ``price``: of a device for an hour, ``2.5``, or ``"engine=1.2,learner=2.5"``.
* ``num_processes``: that simulate side by side; more than one import the program's main module again, so a script that
  asks for them needs its ``if __name__ == "__main__"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from penstock.backends.ledger.audit import AuditReport
from penstock.messages.errors import RunFailedError, UserFault
from penstock.messages.option_keys import Names
from penstock.runtime.hosts.virtual.simulate_view import Result as SimulationResult
from penstock.runtime.launch.apart import EvaluateJob, LaunchJob, ResumeJob
from penstock.runtime.launch.evaluate import evaluation_name
from penstock.runtime.launch.handle import Run, begin, new_folder
from penstock.runtime.launch.inputs import Function, Rows, write_function, write_rows
from penstock.runtime.launch.runs import RECORD_NAME, audit_run, newest_run, read_record
from penstock.runtime.launch.scenarios_given import AnyScenario, Overrides, plain_of, source_of, texts_of
from penstock.runtime.launch.status import RunStatus
from penstock.runtime.observability.accounting import Accounts
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.samples import ShownSample as Sample
from penstock.runtime.observability.summary import RunSummary
from penstock.runtime.observability.traces import SpanRow
from penstock.runtime.observability.trackers import ActivityRow, StepRow
from penstock.runtime.prediction.programs import calibrate, calibrate_from, forecast, plan, rehearse, simulate
from penstock.runtime.run_folder import RUNS
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.load import scenario_from
from penstock.runtime.scenario.named import absolute
from penstock.runtime.scenario.shipped import find_scenario

if TYPE_CHECKING:
    from penstock.runtime.prediction.forecast import Forecast
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.planned import Planned
    from penstock.runtime.prediction.rehearsal import Rehearsal
    from penstock.runtime.run.replay import Replayed
    from penstock.runtime.submit.job import Job

__all__ = [
    "Accounts",
    "ActivityRow",
    "AuditReport",
    "EvaluationRow",
    "Forecast",
    "Job",
    "Models",
    "Planned",
    "Rehearsal",
    "Replayed",
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
    "calibrate",
    "calibrate_from",
    "check",
    "evaluate",
    "forecast",
    "list_runs",
    "load_scenario",
    "open_run",
    "plan",
    "rehearse",
    "replay",
    "resume",
    "run",
    "simulate",
    "submit",
    "train",
]

_TAKE_LONG: Final = {
    "Forecast": "prediction.forecast",
    "Job": "submit.job",
    "Models": "prediction.models",
    "Planned": "prediction.planning.planned",
    "Rehearsal": "prediction.rehearsal",
    "Replayed": "run.replay",
}
"""What functions return, whose modules are imported with the first use of the name."""

if not TYPE_CHECKING:  # a checker knows them from above, and finds no name that is not there

    def __getattr__(name: str) -> object:
        if name not in _TAKE_LONG:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"penstock.runtime.{_TAKE_LONG[name]}"), name)


AnyRun: TypeAlias = "Run | str | Path"
"""A run, or its folder."""

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
    return scenario_from(source_of(scenario, overrides))


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
    return begin(ResumeJob(folder=str(folder), overrides=texts_of(overrides)), wait=wait, progress=progress)


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
            overrides=texts_of(overrides),
            version=version,
            data=texts,
            settings=cast("dict[str, Any]", plain_of({**wanted, **(settings or {})})),
            folder=str(folder),
        )
        return begin(job, wait=wait, progress=progress)


def replay(
    run: AnyRun | None = None, *, actor: str = "", until: int | str = "", breaks_on: str = "", anyway: bool = False
) -> Replayed:
    """Whether every command of a recorded run comes out again, as ``penstock replay``: ``.is_same`` says it in a word,
    ``.moment`` where not.

    Args:
        run: None: the newest one under ``./runs``.
        actor: the only one that is replayed; empty: all.
        until: a step, ``12``, or an event, ``"buffer-1:123"``, behind which it stops; empty: the end.
        breaks_on: class or subject of the first event or command at which it stops.
        anyway: also where the rules are other ones than those of the run.

    Raises:
        UserFault: the run was not recorded, or its recording cannot be read.
    """
    from penstock.runtime.run.replay import Choice, replay_run

    return replay_run(open_run(run).folder, Choice(actor, str(until), breaks_on, anyway))


def submit(
    scenario: AnyScenario,
    scheduler: Literal["slurm", "rayjob", "skypilot"],
    overrides: Overrides = None,
    *,
    config: str | Path | None = None,
    new: bool = False,
) -> Job | None:
    """Give a run to a scheduler, as ``penstock run --submit … --job submit``: its ``.folder`` is the run's, and
    ``.record.job_id`` what the scheduler calls it. One that it has already is returned as it is.

    Args:
        scenario: see :func:`load_scenario`.
        scheduler: who is given it.
        config: the file with partition, image, time limit, …; docs/clusters.md.
        new: another run, whatever was submitted before.

    Returns:
        None where the run is completed, and nothing more is asked of it.

    Raises:
        UserFault: something has to be changed, or is missing.
    """
    from penstock.runtime.submit.submission import give_to_scheduler

    file = None if config is None else Path(config)
    return give_to_scheduler(load_scenario(scenario, overrides), scheduler, file, is_new=new)


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
    return run if isinstance(run, Run) else Run(newest_run(RUNS) if run is None else run)


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
