"""How far the models are off as a whole: each recorded run's own scenario, played with them, beside what was measured.

The models were fitted to these runs, so the check says whether they hold what matters. What it cannot say is how far
off they are where nothing was recorded: another load, another overlap of engines and learner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.messages.errors import UserFault
from penstock.runtime.observability.facts import SCENARIO_FILE
from penstock.runtime.prediction.calibrate import calibrate
from penstock.runtime.prediction.forecast import play
from penstock.runtime.prediction.models import Check
from penstock.runtime.prediction.recorded import read_recording
from penstock.runtime.scenario.modelled import load_modelled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.recorded import Recording


def calibrated(folders: Sequence[Path], *, has_checks: bool) -> Models:
    """Fit the models to these recorded runs, and check them.

    Raises:
        UserFault: a run cannot be read or fitted, or is named twice.
    """
    for place, folder in enumerate(folders):
        if folder.resolve() in (each.resolve() for each in folders[:place]):
            raise UserFault(f"{folder}: is named twice, and would count twice; name each run once")
    recordings = [read_recording(folder) for folder in folders]
    models = calibrate(recordings)
    return checked(models, recordings) if has_checks else models


def checked(models: Models, recordings: Sequence[Recording]) -> Models:
    """The models with the checks of these runs; a run that cannot be played is named in ``unknown``."""
    checks: list[Check] = []
    unknown = list(models.unknown)
    for recording in recordings:
        try:
            checks.append(_check(models, recording))
        except UserFault as error:
            unknown.append(f"{recording.folder}: not played again as a check: {error}")
    return replace(models, checks=tuple(checks), unknown=tuple(unknown))


def _check(models: Models, recording: Recording) -> Check:
    measured, run = recording.steady, recording.scenario.run
    if measured is None:
        raise UserFault(f"{recording.num_steps} steps are too few for a steady part")
    scenario = models.applied(load_modelled(recording.folder / SCENARIO_FILE)[0])
    scenario = replace(scenario, run=replace(scenario.run, num_steps=recording.num_steps))
    predicted = play(scenario, run.seed)
    return Check(
        folder=str(recording.folder),
        policy=scenario.staleness.policy,
        step_s=measured.step_s,
        step_error=predicted.step_s / measured.step_s - 1,
        engines_busy=measured.engines_busy,
        engines_busy_predicted=predicted.engines_busy,
        learner_busy=measured.learner_busy,
        learner_busy_predicted=predicted.learner_busy,
    )
