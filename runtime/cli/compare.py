"""``penstock compare``: runs beside each other, in the terminal, as JSON, and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import read_record
from penstock.runtime.observability.compared_runs import read_arms
from penstock.runtime.observability.comparison import compare_arms
from penstock.runtime.observability.comparison_page import write_comparison
from penstock.runtime.observability.comparison_texts import arms_table, differences_tables, figures_tables
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.observability import comparison_texts
    from penstock.runtime.observability.comparison import Comparison

MAX_CELL_CHARS: Final = 300


def show_comparison(
    folders: Sequence[Path], console: Console, *, as_json: bool, page: Path | None, reward: float | None
) -> None:
    """Print the comparison, and write the page where one is asked for.

    Raises:
        UserFault: fewer than two runs, or one of them twice; a folder holds no run, or a damaged one; ``reward`` is
            asked for and a run has none; the page cannot be written.
    """
    for folder in folders:
        read_record(folder)
    arms = read_arms(folders)
    comparison = compare_arms(arms, reward=reward)
    if reward is not None and comparison.reached is None:
        raise UserFault("--reward: not every run has a reward; compare those that have, or leave the option out")
    if as_json:
        print_json(comparison, console)
    else:
        _show(comparison, console)
    if page is not None:
        try:
            write_comparison(arms, comparison, page)
        except OSError as error:
            raise UserFault(f"--out {page}: cannot write it: {(error.strerror or str(error)).lower()}") from None
        if not as_json:
            console.print(f"wrote {escape(terminal_text(str(page)))}", soft_wrap=True)


def _show(comparison: Comparison, console: Console) -> None:
    _show_table(arms_table(comparison), console)
    for text in comparison.cautions:
        console.print(f"[yellow]![/] {escape(terminal_text(text))}")
    console.print()
    tables = figures_tables(comparison)
    for table in (*differences_tables(comparison), *tables):
        _show_table(table, console)
    if tables:
        console.print(escape(comparison.method), style="dim")
    else:
        console.print("Fewer than two runs have made a step, so no figure can be compared.")


def _show_table(table: comparison_texts.Table, console: Console) -> None:
    console.print(f"[bold]{escape(table.title)}[/]  [dim]{escape(terminal_text(table.detail))}[/]")
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in table.head:
        shown.add_column(escape(name), overflow="fold")
    for row in table.rows:
        shown.add_row(*(escape(terminal_text(cell, max_chars=MAX_CELL_CHARS)) for cell in row))
    console.print(shown)
