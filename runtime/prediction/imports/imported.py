"""Models from what another system has logged, with the files that are asked for: as the command line and programs have
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.runtime.output_file import check_new_output
from penstock.runtime.prediction.imports.described import checked_import, write_described
from penstock.runtime.prediction.imports.fit import fit
from penstock.runtime.prediction.imports.measured import Measured
from penstock.runtime.prediction.imports.read import read_logs
from penstock.runtime.prediction.imports.rollouts import read_rollouts
from penstock.runtime.prediction.models import write_models

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.prediction.imports.about import About
    from penstock.runtime.prediction.models import Models


class LogsGiven(NamedTuple):
    """What is read, and which files are written."""

    logs: Sequence[Path]
    """At least one."""
    about: About
    log_format: str | None
    """None: told by the names of its metrics."""
    rollouts: Path | None
    scenario: Path | None
    """A new file, for a scenario of what the log describes."""
    out: Path | None
    """A new file, for the models."""


def imported(given: LogsGiven, *, has_checks: bool) -> tuple[Measured, Models]:
    """What the log says, and the models that are fitted to it.

    Raises:
        UserFault: a log cannot be read, or does not say enough; the message says what would. Or a file is there.
    """
    for path, option in ((given.out, "--output"), (given.scenario, "--scenario")):
        if path is not None:
            check_new_output(path, option)
    found = Measured(read_logs(given.logs), given.about, forced=given.log_format)
    samples = [] if given.rollouts is None else read_rollouts(given.rollouts, found.mean_tokens)
    models = fit(found, given.logs[0], samples)
    if has_checks:
        models = checked_import(found, models)
    if given.out is not None:
        write_models(models, given.out)
    if given.scenario is not None:
        write_described(found, models, given.scenario)
    return found, models
