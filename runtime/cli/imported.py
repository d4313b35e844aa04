"""``penstock calibrate --from``: models from what another system has logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from penstock.messages.texts import counted
from penstock.runtime.cli.prediction import show_models
from penstock.runtime.output_file import check_new_output
from penstock.runtime.prediction.imports.about import read_about
from penstock.runtime.prediction.imports.described import checked_import, write_described
from penstock.runtime.prediction.imports.fit import fit
from penstock.runtime.prediction.imports.measured import Measured
from penstock.runtime.prediction.imports.read import read_logs
from penstock.runtime.prediction.imports.rollouts import read_rollouts
from penstock.runtime.prediction.models import write_models

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console


class Asked(NamedTuple):
    """The command line."""

    logs: Sequence[Path]
    log_format: str | None
    about: Sequence[str]
    rollouts: Path | None
    scenario: Path | None
    out: Path


def import_and_show(asked: Asked, console: Console, *, has_checks: bool, as_json: bool) -> None:
    """Read, fit, check, write, print.

    Raises:
        UserFault: a log cannot be read, or does not say enough; the message says what would. Or a file is there.
    """
    check_new_output(asked.out, "--output")
    if asked.scenario is not None:
        check_new_output(asked.scenario, "--scenario")
    found = Measured(read_logs(asked.logs), read_about(asked.about), forced=asked.log_format)
    samples = [] if asked.rollouts is None else read_rollouts(asked.rollouts, found.mean_tokens)
    models = fit(found, asked.logs[0], samples)
    if has_checks:
        with console.status("playing the run"):
            models = checked_import(found, models)
    write_models(models, asked.out)
    if asked.scenario is not None:
        write_described(found, models, asked.scenario)
    if not as_json:
        how = "generating while it trains" if found.is_overlapped else "generating and training in turns"
        console.print(f"{found.system}: {counted(len(found.steps), 'step')}, {how} ({found.policy})")
    show_models(models, asked.out, console, as_json=as_json)
    if asked.scenario is not None and not as_json:
        console.print(f"written: {escape(str(asked.scenario))}", soft_wrap=True)
