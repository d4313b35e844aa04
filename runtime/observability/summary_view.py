"""The end of a run on the terminal: what it came to, and where its files lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.runtime.observability.accounting_view import accounts_tables
from penstock.runtime.observability.report import balance_rows
from penstock.runtime.observability.summary import policies_text
from penstock.runtime.observability.texts import NOTHING, count_text, duration_text, fixed, number_text, short_count
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from penstock.messages.reasons import ReasonCount
    from penstock.runtime.observability.accounting import Accounts
    from penstock.runtime.observability.summary import RunSummary


def show_summary(summary: RunSummary, console: Console, accounts: Accounts | None = None) -> None:
    """Print the outcome, then the places of report, metrics and checkpoint: each on a line of its own, whole, so that
    it can be copied.

    Args:
        summary: of the run.
        console: where to print.
        accounts: where its time and its tokens went, where that is to be shown too.
    """
    console.print(summary_panel(summary, accounts))
    for label, place in (("report", summary.report), ("metrics", summary.metrics), ("checkpoint", summary.checkpoint)):
        if place:
            console.print(f"  [dim]{label:<10}[/]  {escape(terminal_text(place))}", soft_wrap=True)


def summary_panel(summary: RunSummary, accounts: Accounts | None = None) -> Panel:
    """A panel with the outcome, the balance of the samples, where time and tokens went, and why samples failed."""
    colour = "green" if summary.completed else "red"
    outcome = "completed" if summary.completed else "not completed"
    parts: list[RenderableType] = []
    if summary.story:
        parts += [Text(terminal_lines(summary.story)), Text()]
    for text in summary.warnings:
        parts += [Text(terminal_lines(text), style="yellow"), Text()]
    parts += [_facts(summary), Text(), _balance(summary)]
    if accounts is not None:
        parts.append(accounts_tables(accounts))
    if summary.failures:
        parts += [Text(), failures_table(summary.failures, summary.num_failures)]
    title = f"[bold]{escape(summary.scenario)}[/] [{colour}]{outcome}[/]"
    return Panel(Group(*parts), title=title, title_align="left", border_style=colour, box=box.ROUNDED, expand=False)


def _facts(summary: RunSummary) -> Table:
    table = _grid()
    times = f"{duration_text(summary.training_s)} ({duration_text(summary.wall_s)} in all)"
    if summary.num_steps:
        table.add_row("steps", f"{summary.version:,} of {summary.num_steps:,} in {times}")
    else:
        table.add_row("took", times)
    if len(summary.policies) > 1:
        table.add_row("policy", escape(terminal_text(policies_text(summary.policies))))
    if summary.last10_reward is not None:
        rewards = f"first ten {fixed(summary.first10_reward, 3)} → last ten [bold]{fixed(summary.last10_reward, 3)}[/]"
        table.add_row("reward", rewards)
    for outcome in summary.evaluations:
        course = f"reward {fixed(outcome.first, 3)} at version {outcome.first_version}"
        if outcome.last_version > outcome.first_version:
            course += f" → [bold]{fixed(outcome.last, 3)}[/] at {outcome.last_version}"
        table.add_row("evaluation", f"{escape(outcome.name)}: {course}")
    ages = f"largest {summary.max_staleness} (bound {summary.staleness_bound}), mean {fixed(summary.mean_staleness, 2)}"
    table.add_row("staleness", ages)
    mean, largest = number_text(summary.mean_logprob_abs_diff, 3), number_text(summary.max_logprob_abs_diff, 3)
    if summary.mean_logprob_abs_diff is not None:
        table.add_row("log-prob difference", f"mean {mean}, largest {largest} nats")
    table.add_row("tokens", _tokens(summary))
    if wasted := sum(waste.num_tokens for waste in summary.tokens_wasted):
        table.add_row("", f"{short_count(wasted)} wasted")
    if summary.tokens_lost_estimate:
        table.add_row("", f"beside these about {short_count(summary.tokens_lost_estimate)} lost with killed engines")
    restarts = ", ".join(f"{restart.name} × {restart.count}" for restart in summary.restarts)
    table.add_row("restarts", escape(restarts) or "none")
    return table


def _tokens(summary: RunSummary) -> str:
    goodput = NOTHING if summary.goodput is None else f"{100 * summary.goodput:.1f} %"
    return (
        f"{short_count(summary.tokens_generated)} generated, {short_count(summary.tokens_trained)} trained "
        f"({goodput}), {short_count(summary.tokens_per_s)}/s"
    )


def _balance(summary: RunSummary) -> Table:
    balance = summary.balance
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True, padding=(0, 2, 0, 0))
    table.add_column("state", footer="issued")
    verdict = "[green]balanced[/]" if balance.is_balanced else "[bold red]not balanced[/]"
    table.add_column("cause", footer=verdict)
    table.add_column("samples", justify="right", footer=count_text(balance.issued))
    table.add_column("share", justify="right")
    table.add_column("tokens", justify="right")
    for row in balance_rows(balance):
        tokens = count_text(row.num_tokens) if row.num_tokens else NOTHING
        table.add_row(row.state, escape(row.cause), count_text(row.num_samples), f"{row.share:.1f} %", tokens)
    return table


def failures_table(counts: Sequence[ReasonCount], num_samples: int, limit: int = 5) -> Table:
    """Why samples failed, the most frequent reasons first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("failed", justify="right")
    table.add_column("cause")
    table.add_column("reason", overflow="fold")
    for count in counts[:limit]:
        table.add_row(count_text(count.num_samples), Text(count.cause), Text(terminal_text(count.example), style="red"))
    if rest := num_samples - sum(count.num_samples for count in counts[:limit]):
        table.add_row(count_text(rest), "", Text("for other reasons", style="dim"))
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
