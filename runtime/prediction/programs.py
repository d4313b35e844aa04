"""What the simulation is asked by programs: the functions of :mod:`penstock.api` that are about it.

What takes long to be imported is imported by whoever asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from penstock.messages.errors import UserFault
from penstock.runtime.launch.handle import Run
from penstock.runtime.launch.scenarios_given import AnyScenario, Overrides, source_of
from penstock.runtime.output_file import check_new_output
from penstock.runtime.prediction.argument_words import in_arguments
from penstock.runtime.scenario.modelled import modelled_from

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.runtime.hosts.virtual.simulate_view import Result
    from penstock.runtime.prediction.forecast import Forecast
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Prices
    from penstock.runtime.prediction.planning.planned import Planned
    from penstock.runtime.prediction.rehearsal import Rehearsal
    from penstock.runtime.scenario import Scenario

AnyModels: TypeAlias = "Models | str | Path | None"
"""How long things take: as calibration returns them, or its file; None: as the scenario has it."""


@in_arguments
def simulate(
    scenario: AnyScenario,
    overrides: Overrides = None,
    *,
    models: AnyModels = None,
    seed: int = 0,
    folder: str | Path | None = None,
) -> Result:
    """Run the same actors on a virtual clock with modelled engines and learner, as ``penstock simulate``: hours in
    seconds, in this process.

    Args:
        scenario: see :func:`penstock.api.load_scenario`.
        seed: of latencies and faults; the same seed gives the same run.
        folder: where event log, metrics and report go; None writes nothing.

    Raises:
        UserFault: the scenario cannot be simulated, or the folder cannot be written.
    """
    from penstock.runtime.hosts.virtual.simulate import simulated

    modelled = _modelled(scenario, overrides, models)
    return simulated(modelled, seed=seed, run_folder=None if folder is None else Path(folder))[0]


@in_arguments
def forecast(
    scenario: AnyScenario, overrides: Overrides = None, *, models: AnyModels = None, num_seeds: int = 5, seed: int = 0
) -> Forecast:
    """The figures of the steady part of a scenario's run, with intervals over several seeds, as ``penstock simulate
    --seeds``.

    Args:
        scenario: see :func:`penstock.api.load_scenario`.
        num_seeds: that are played, one or more.
        seed: the first one.

    Raises:
        UserFault: a simulation did not come to its end, or has too few steps.
    """
    from penstock.runtime.prediction.forecast import forecast as played

    return played(_modelled(scenario, overrides, models), range(seed, seed + num_seeds))


@in_arguments
def calibrate(
    runs: Run | str | Path | Sequence[Run | str | Path], *, check: bool = True, output: str | Path | None = None
) -> Models:
    """Fit the models of the simulation to recorded runs, as ``penstock calibrate``.

    Args:
        runs: of one model; they were traced.
        check: play each run again with the models; ``.checks`` and ``.expected_error`` say how far they are off.
        output: a new file that :func:`simulate` and ``--models`` take; None writes none.

    Raises:
        UserFault: a run cannot be read or fitted, or the file is there already.
    """
    from penstock.runtime.prediction.checking import calibrated
    from penstock.runtime.prediction.models import write_models

    if output is not None:
        check_new_output(Path(output), "output")
    given = [runs] if isinstance(runs, Run | str | Path) else runs
    models = calibrated([(each if isinstance(each, Run) else Run(each)).folder for each in given], has_checks=check)
    if output is not None:
        write_models(models, Path(output))
    return models


@in_arguments
def calibrate_from(
    logs: str | Path | Sequence[str | Path],
    about: Mapping[str, object] | None = None,
    *,
    log_format: str | None = None,
    rollouts: str | Path | None = None,
    check: bool = True,
    output: str | Path | None = None,
    scenario: str | Path | None = None,
) -> Models:
    """Fit the models of the simulation to what another system has logged, as ``penstock calibrate --from``.

    Args:
        logs: metrics of one run of verl, TRL, slime, NeMo-RL or prime-rl; several files are parts of it.
        about: what they do not say: ``{"engines": 8, "learner_ranks": 8}``; docs/prediction.md has the keys.
        log_format: the system; None: told by the names of the metrics.
        rollouts: single responses that verl or NeMo-RL wrote beside the log.
        check: play the run with the models; ``.checks`` and ``.expected_error`` say how far they are off.
        output: as of :func:`calibrate`.
        scenario: a new file for a scenario of what the log describes; None writes none.

    Raises:
        UserFault: a log cannot be read, or does not say enough; the message says what would. Or a file is there.
    """
    from penstock.runtime.prediction.imports.about import about_of
    from penstock.runtime.prediction.imports.imported import LogsGiven, imported

    files = [Path(each) for each in ([logs] if isinstance(logs, str | Path) else logs)]
    if not files:
        raise UserFault("logs: name at least one file")
    beside, described, out = (None if each is None else Path(each) for each in (rollouts, scenario, output))
    given = LogsGiven(files, about_of(about or {}), log_format, beside, described, out)
    return imported(given, has_checks=check)[1]


@in_arguments
def plan(
    scenario: AnyScenario,
    num_devices: int,
    overrides: Overrides = None,
    *,
    objective: str = "throughput",
    price: str | float | None = None,
    models: AnyModels = None,
    max_staleness: int = 4,
    slots: Sequence[int] = (),
    engine_speeds: Mapping[int, float] | None = None,
    vary: Mapping[str, Sequence[object]] | None = None,
    rank_efficiency: float = 1.0,
    num_seeds: int = 5,
    budget: int = 48,
    num_processes: int = 1,
) -> Planned:
    """Search by simulation for the best use of devices, as ``penstock plan``. ``.scenario`` of what is returned is the
    one to run; ``.plan`` has what nothing beats, with intervals, and ``.assumed`` what nothing has measured.

    Args:
        scenario: see :func:`penstock.api.load_scenario`.
        num_devices: for engines and learner together, at most.
        objective: ``throughput``, ``goodput`` or ``cost``, which takes a price.
        max_staleness: bounds of staleness to be tried, at most.
        slots: of an engine, to be tried; none: the scenario's, and near it.
        engine_speeds: engines of so many devices, so many times as quick: ``{2: 1.7}``.
        vary: values of further keys to be tried: ``{"learner.groups_per_batch": [32, 64]}``.
        rank_efficiency: what is kept of a learner's speed per device when it is doubled.
        num_seeds: of each choice that is compared in the end.
        budget: simulations, at most.

    Raises:
        UserFault: the scenario cannot be planned.
    """
    from penstock.runtime.prediction.planning.candidate import Asked, read_objective
    from penstock.runtime.prediction.planning.planned import planned
    from penstock.runtime.prediction.planning.varied import read_varied

    asked = Asked(
        num_devices=num_devices, objective=read_objective(objective), prices=_prices(price),
        max_staleness=max_staleness, slots=tuple(slots), engine_speeds=dict(engine_speeds or {}),
        rank_efficiency=rank_efficiency, num_seeds=num_seeds, budget=budget,
    )  # fmt: skip
    varied = read_varied([f"{key}={','.join(map(str, values))}" for key, values in (vary or {}).items()])
    source, fitted = source_of(scenario, overrides), _models(models)
    return planned(source, asked, models=fitted, varied=varied, num_processes=num_processes)


@in_arguments
def rehearse(
    scenario: AnyScenario,
    faults: str,
    overrides: Overrides = None,
    *,
    price: str | float | None = None,
    models: AnyModels = None,
    num_seeds: int = 20,
    seed: int = 0,
    num_processes: int = 1,
) -> Rehearsal:
    """Play a whole run many times with faults that come by chance, as ``penstock rehearse``.

    Args:
        scenario: see :func:`penstock.api.load_scenario`.
        faults: ``"preempt 0.05/h per engine, learner 0.01/h"``.
        num_seeds: runs with faults; each is played without them too.
        seed: the first one.

    Raises:
        UserFault: the faults cannot be read, or the scenario cannot be played.
    """
    from penstock.runtime.prediction.rehearsal import rehearsed

    source, seeds = source_of(scenario, overrides), range(seed, seed + num_seeds)
    return rehearsed(source, faults, seeds, prices=_prices(price), models=_models(models), num_processes=num_processes)


def _modelled(scenario: AnyScenario, overrides: Overrides, models: AnyModels) -> Scenario:
    resolved, _ = modelled_from(source_of(scenario, overrides))
    if resolved.run.only is not None:
        raise UserFault(f"run.only: {resolved.run.only}: a part of a run is not simulated; remove it")
    fitted = _models(models)
    return resolved if fitted is None else fitted.applied(resolved)


def _models(models: AnyModels) -> Models | None:
    from penstock.runtime.prediction.models import read_models

    return read_models(Path(models)) if isinstance(models, str | Path) else models


def _prices(price: str | float | None) -> Prices | None:
    from penstock.runtime.prediction.planning.candidate import read_prices

    return None if price is None else read_prices(str(price))
