"""``penstock plan``: the search with its progress; what it has found as a table, as a picture and as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.messages.texts import counted
from penstock.runtime.cli.prediction import model_errors, percent, spread_text
from penstock.runtime.observability.facts import command_line
from penstock.runtime.observability.texts import duration_text, length_text, number_text, short_count
from penstock.runtime.output_file import check_new_output
from penstock.runtime.pictures import check_picture, write_picture
from penstock.runtime.prediction.planning.candidate import SECONDS_OF_HOUR, Objective
from penstock.runtime.prediction.planning.pareto_svg import pareto_svg
from penstock.runtime.prediction.planning.planned import planned
from penstock.runtime.prediction.planning.planned_file import write_planned
from penstock.runtime.scenario.load import overridden_source
from penstock.runtime.scenario.source import read_source
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.prediction.forecast import Interval
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Asked
    from penstock.runtime.prediction.planning.measured import Measured
    from penstock.runtime.prediction.planning.planned import Planned
    from penstock.runtime.prediction.planning.search import Plan
    from penstock.runtime.prediction.planning.varied import VariedSpace

MOST_ROWS: Final = 16
MOST_REFUSALS: Final = 4


def plan_and_show(
    file: Path,
    overrides: Sequence[str],
    asked: Asked,
    console: Console,
    *,
    models: Models | None,
    out: Path,
    plot: Path | None,
    num_processes: int,
    as_json: bool,
    varied: dict[str, tuple[str, ...]],
) -> None:
    """Search, print, write the scenario and the picture.

    Raises:
        UserFault: the scenario cannot be planned, or the files cannot be written.
    """
    picture = plot or out.with_suffix(".svg")
    for path, option in ((out, "--output"), (picture, "--plot")):
        check_new_output(path, option)
    check_picture(picture, "--plot")
    source = overridden_source(read_source(file), overrides)
    with _bar(console, is_off=as_json) as bar:
        on_round = _rounds(bar, asked.budget)
        found = planned(source, asked, models=models, varied=varied, num_processes=num_processes, on_round=on_round)
    plan, space = found
    write_planned(found.scenario, out, _remarks(found, asked, models))
    title = f"{space.real.run.name}: {counted(asked.num_devices, 'device')}"
    write_picture(picture, pareto_svg(plan, title, has_price=asked.objective is Objective.COST))
    if as_json:
        print_json(plan, console)
        return
    console.print(_table(plan, asked, space))
    for text in _told(plan, space, models):
        console.print(text, soft_wrap=True)
    console.print(
        f"written: {escape(str(out))}, {escape(str(picture))}; next: penstock run {escape(str(out))} --dry-run",
        soft_wrap=True,
    )


def _bar(console: Console, *, is_off: bool) -> Progress:
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("at most"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=is_off or not console.is_terminal)


def _rounds(bar: Progress, most: int) -> Callable[[int], Callable[[], None]]:
    task = bar.add_task("", total=most)

    def begin(_: int) -> Callable[[], None]:
        return lambda: bar.advance(task)

    return begin


def _table(plan: Plan, asked: Asked, space: VariedSpace) -> Table:
    title = (
        f"[bold]{escape(space.real.run.name)}[/]: up to {counted(asked.num_devices, 'device')}, for "
        f"{asked.objective}; what "
        f"nothing beats, mean of {counted(asked.num_seeds, 'seed')}, lowest to highest"
    )
    table = Table(title=title, box=box.ROUNDED, title_justify="left", show_lines=True)
    headings = ["engines + learner", "tokens/s", "step", "age", "busy"]
    for heading in headings if asked.prices is None else [*headings, "price of\n1M tokens", "price of\nwhole run"]:
        is_first = heading == headings[0]  # with prices it gives way in a terminal of 80 columns
        table.add_column(heading, justify="left" if is_first else "right", no_wrap=is_first and asked.prices is None)
    rows = [*plan.pareto] if plan.chosen in plan.pareto else [plan.chosen, *plan.pareto]
    for each in rows[:MOST_ROWS]:
        table.add_row(*_cells(each, asked, space), style="bold" if each == plan.chosen else "")
    return table


def _cells(each: Measured, asked: Asked, space: VariedSpace) -> list[str]:
    choice = each.candidate
    goodput = f"\ngoodput {percent(each.goodput.mean)}" if each.goodput.mean < 0.9995 else ""
    few = f"\n{each.num_seeds} of {counted(asked.num_seeds, 'seed')}" if each.num_seeds < asked.num_seeds else ""
    cells = [
        f"{choice.split}\n{choice.slots:,} slots\n{escape(choice.schedule)}",
        _over(each.tokens_per_s, short_count) + few,
        length_text(each.step_s.mean),
        f"{each.mean_age.mean:.2f}{goodput}",
        f"{100 * each.engines_busy.mean:.0f} % / {100 * each.learner_busy.mean:.0f} %",
    ]
    if asked.prices is not None and each.cost is not None:
        run_s = each.step_s.mean * space.real.run.num_steps
        total = choice.hourly(asked.prices) * run_s / SECONDS_OF_HOUR
        cells += [_over(each.cost, _price), f"{_price(total)}\n{duration_text(run_s)}"]
    return cells


def _over(found: Interval, text: Callable[[float], str]) -> str:
    low, high = text(found.low), text(found.high)
    return text(found.mean) if low == high else f"{text(found.mean)}\n{low} to {high}"


def _price(value: float) -> str:
    return number_text(value, 3)


def _told(plan: Plan, space: VariedSpace, models: Models | None) -> list[str]:
    """Everything below the table, as markup."""
    lines = [f"chosen: [bold]{escape(plan.chosen.candidate.short)}[/]", escape(_effort(plan))]
    lines += [f"[yellow]assumed[/] {escape(text)}" for text in space.assumed(plan.chosen.candidate)]
    lines += [escape(text) for text in model_errors(models)]
    lines += [f"[dim]not searched[/] {escape(text)}" for text in space.not_searched]
    lines += [f"[dim]refused[/] {escape(text)}" for text in plan.refused[:MOST_REFUSALS]]
    if len(plan.refused) > MOST_REFUSALS:
        lines.append(f"[dim]refused[/] and {len(plan.refused) - MOST_REFUSALS} reasons more")
    return lines


def _effort(plan: Plan) -> str:
    share = percent(plan.num_simulations / plan.num_exhaustive)
    parts = f" ({plan.num_parts:,} of a part of the batch)" if plan.num_parts else ""
    return (
        f"{plan.num_simulations:,} simulations{parts}; all {plan.num_candidates:,} choices with every seed would be "
        f"{plan.num_exhaustive:,} ({share})"
    )


def _remarks(found: Planned, asked: Asked, models: Models | None) -> list[str]:
    """What leads the file."""
    best, choice = found.plan.chosen, found.plan.chosen.candidate
    objective = {Objective.COST: "lowest cost", Objective.GOODPUT: "highest goodput"}.get(
        asked.objective, "highest throughput"
    )
    return [
        f"Chosen for {objective} on up to {counted(asked.num_devices, 'device')}: {choice.short} "
        f"({counted(choice.num_devices, 'device')}).",
        f"Predicted: {spread_text(best.tokens_per_s, short_count)} trained tokens/s, a step in "
        f"{length_text(best.step_s.mean)}, mean age {best.mean_age.mean:.2f} versions.",
        *(f"Assumed: {text}" for text in found.assumed),
        *model_errors(models),
        f"By: {command_line()}",
    ]
