"""``penstock rehearse``: what faults by chance would make of a run, and how to bring one of these runs about."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.messages.texts import counted
from penstock.runtime.cli.prediction import model_errors, percent
from penstock.runtime.observability.texts import duration_text, number_text, short_count
from penstock.runtime.prediction.planning.candidate import SECONDS_OF_HOUR
from penstock.runtime.prediction.rehearsal import chaos_faults, quantile_of, rehearsed
from penstock.runtime.scenario.load import overridden_source
from penstock.runtime.scenario.source import read_source
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Prices
    from penstock.runtime.prediction.rehearsal import Played, Rehearsal

USUAL, WORST = 0.5, 0.95


def rehearse_and_show(
    file: Path,
    overrides: Sequence[str],
    faults: str,
    seeds: range,
    console: Console,
    *,
    prices: Prices | None,
    models: Models | None,
    num_processes: int,
    as_json: bool,
) -> int:
    """Play, print.

    Returns:
        The exit code: 1 where a run with faults did not complete.

    Raises:
        UserFault: the faults cannot be read, or the scenario cannot be played.
    """
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal)
    source = overridden_source(read_source(file), overrides)
    with bar:
        task = bar.add_task("", total=2 * len(seeds))
        found = rehearsed(
            source,
            faults,
            seeds,
            prices=prices,
            models=models,
            num_processes=num_processes,
            on_done=lambda: bar.advance(task),
        )
    completed = found.completed
    if as_json:
        print_json(found, console)
    else:
        _show(found, completed, file, overrides, console)
        for text in model_errors(models):
            console.print(escape(text), soft_wrap=True)
    return 0 if len(completed) == len(found.runs) else 1


def _show(
    found: Rehearsal, completed: Sequence[Played], file: Path, overrides: Sequence[str], console: Console
) -> None:
    failed = [run for run in found.runs if not run.completed]
    if completed:
        console.print(_table(found, completed))
    for run in failed[:1]:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        text = f"seed {run.seed}{others} of {len(found.runs)} after {duration_text(run.finish_s)}: {run.story}"
        console.print(f"[red]not completed[/] {escape(text)}", soft_wrap=True)
    shown: list[tuple[str, Played]] = []
    if completed:
        shown = [("median", quantile_of(completed, USUAL)), ("worst", quantile_of(completed, 1.0))]
    for name, run in [*shown, *(("failed", each) for each in failed[:1])]:
        hits = list(chaos_faults(run))
        if not hits:
            console.print(f"[dim]{name}[/] seed {run.seed}: no fault came while it trained", soft_wrap=True)
            continue
        words = ("penstock", "chaos", str(file), *overrides, "--faults", ",".join(hits), "--seed", str(run.seed))
        console.print(f"[dim]{name}[/] seed {run.seed}, {_counted(hits)}, for real:", soft_wrap=True)
        console.print(f"  {escape(shlex.join(words))}", soft_wrap=True)


def _counted(hits: Sequence[str]) -> str:
    return counted(len(hits), "fault")


def _table(found: Rehearsal, completed: Sequence[Played]) -> Table:
    title = f"[bold]{escape(found.scenario)}[/]: {counted(len(found.runs), 'seed')} with {escape(found.faults)}"
    table = Table(title=title, box=box.ROUNDED, title_justify="left")
    for heading in ("", "without faults, P50", "P50", "P95"):
        table.add_column(heading, justify="left" if not heading else "right")
    calm = _quantile([run.undisturbed_s for run in completed], USUAL)

    def row(
        name: str, value: Callable[[Played], float], text: Callable[[float], str], before: str, worst: float
    ) -> None:
        values = [value(run) for run in completed]
        table.add_row(name, before, text(_quantile(values, USUAL)), text(_quantile(values, worst)))

    row("finish", lambda run: run.finish_s, duration_text, duration_text(calm), WORST)
    hourly = found.hourly
    if hourly is not None:
        price = hourly / SECONDS_OF_HOUR
        row("cost", lambda run: price * run.finish_s, _price, _price(price * calm), WORST)
    row("faults", lambda run: len(run.hits), short_count, "0", WORST)
    row("tokens lost with engines", lambda run: run.tokens_lost, short_count, "0", WORST)
    row("steps trained again", lambda run: run.steps_again, short_count, "0", WORST)
    row("tokens made and not trained", lambda run: run.tokens_unused, short_count, "–", WORST)
    row("effective training time", lambda run: run.effective, percent, percent(1.0), 1 - WORST)
    return table


def _price(value: float) -> str:
    return number_text(value, 3)


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
