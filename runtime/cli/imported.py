"""``penstock calibrate --from``: models from what another system has logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.messages.texts import counted
from penstock.runtime.cli.prediction import show_models
from penstock.runtime.prediction.imports.imported import LogsGiven, imported

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def import_and_show(given: LogsGiven, out: Path, console: Console, *, has_checks: bool, as_json: bool) -> None:
    """Read, fit, check, write, print.

    Raises:
        UserFault: a log cannot be read, or does not say enough; the message says what would. Or a file is there.
    """
    with console.status("reading the log, and playing the run" if has_checks else "reading the log"):
        found, models = imported(given, has_checks=has_checks)
    if not as_json:
        how = "generating while it trains" if found.is_overlapped else "generating and training in turns"
        console.print(f"{found.system}: {counted(len(found.steps), 'step')}, {how} ({found.policy})")
    show_models(models, out, console, as_json=as_json)
    if has_checks and not as_json:
        console.print("engines busy: of a log the time in which any engine was; predicted, the mean of all engines")
    if given.scenario is not None and not as_json:
        console.print(f"written: {escape(str(given.scenario))}", soft_wrap=True)
