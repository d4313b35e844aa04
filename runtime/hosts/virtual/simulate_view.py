"""The terminal of ``penstock simulate``: progress while it computes, and what the run came to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

import msgspec
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from penstock.messages.ledger import EnginesRecorded
from penstock.messages.samples import TerminalState
from penstock.messages.training import Balance
from penstock.runtime.observability.shares import Shares, shares_text
from penstock.runtime.observability.summary import generated_tokens, trained_tokens
from penstock.runtime.observability.texts import clock_text, duration_text, fixed, short_count, tokens_text

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from penstock.runtime.hosts.virtual.host import VirtualHost

PLAIN_INTERVAL_S: Final = 10.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run came to."""

    scenario: str
    completed: bool
    digest: str
    num_events: int
    took_s: float
    """Real seconds."""
    virtual_s: float
    num_steps: int
    step_s: float | None
    """Mean virtual time between two steps; None of less than two."""
    engines: Shares
    """The time of all engines together."""
    learner: Shares
    scorer: Shares
    """The time of its workers, taken together."""
    mean_staleness: float | None
    max_staleness: int
    bound: int
    balance: Balance
    tokens_lost_estimate: int
    """Made by killed engines since their last report: beside the balance."""
    num_restarts: int
    scalings: tuple[EnginesRecorded, ...] = ()
    """The engines at the start, and each change of them; empty where they cannot join or leave."""

    @property
    def goodput(self) -> float | None:
        """Trained ÷ generated tokens; None when nothing was generated."""
        return trained_tokens(self.balance) / self.tokens_generated if self.tokens_generated else None

    @property
    def tokens_generated(self) -> int:
        """Of every response that came."""
        return generated_tokens(self.balance)

    @property
    def events_per_s(self) -> float:
        return self.num_events / self.took_s


class ProgressView:
    """Steps, virtual time and speed while a simulation computes: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, host: VirtualHost, num_steps: int) -> None:
        self._console = console
        self._host = host
        self._num_steps = num_steps
        self._began_s = time.perf_counter()
        self._last_s = self._began_s
        self._step = 0
        columns = (
            TextColumn("simulating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps · {task.fields[figures]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=num_steps, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, version: int) -> None:
        """A step was recorded."""
        self._step = version
        self.show()

    def show(self) -> None:
        """Bring the view up to now."""
        now_s = time.perf_counter()
        speed = self._host.num_events / max(1e-9, now_s - self._began_s)
        figures = f"{clock_text(self._host.clock.now_s)} of virtual time · {short_count(speed)} events/s"
        self._bar.update(self._task, completed=self._step, figures=figures)
        if not self._console.is_terminal and now_s - self._last_s > PLAIN_INTERVAL_S:
            self._last_s = now_s
            self._console.print(f"step {self._step}/{self._num_steps} · {figures}", highlight=False)


def result_table(result: Result) -> Table:
    """Everything about a simulated run on one table."""
    colour = "green" if result.completed else "red"
    table = Table(title=f"[bold]{escape(result.scenario)}[/]", box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("outcome", f"[{colour}]{'completed' if result.completed else 'not completed'}[/]")
    table.add_row("steps", f"{result.num_steps:,} in {duration_text(result.virtual_s)} of virtual time")
    table.add_row("step time", duration_text(result.step_s))
    table.add_row("engines", shares_text(result.engines))
    if len(result.scalings) > 1:
        numbers = " → ".join(str(len(each.engines)) for each in result.scalings)
        table.add_row("", f"{numbers} engines; the last change: {escape(result.scalings[-1].reason)}")
    table.add_row("learner", shares_text(result.learner))
    table.add_row("scorer", shares_text(result.scorer, "workers"))
    mean = fixed(result.mean_staleness, 2)
    table.add_row("staleness", f"mean {mean}, largest {result.max_staleness} (bound {result.bound})")
    table.add_row("samples", _balance_text(result.balance))
    share = "–" if result.goodput is None else f"{100 * result.goodput:.1f} %"
    table.add_row("goodput", f"{share} of {short_count(result.tokens_generated)} generated tokens were trained")
    table.add_row("tokens", tokens_text(result.balance))
    if result.tokens_lost_estimate:
        table.add_row("", f"about {short_count(result.tokens_lost_estimate)} lost with engines that were killed")
    if result.num_restarts:
        table.add_row("restarts", f"{result.num_restarts:,}")
    table.add_row(
        "events",
        f"{result.num_events:,} in {duration_text(result.took_s)}: {result.events_per_s:,.0f} events/s",
    )
    table.add_row("digest", result.digest)
    return table


def _balance_text(balance: Balance) -> str:
    ended = dict.fromkeys((state.value for state in TerminalState), 0)
    for count in balance.ended:
        ended[count.state] += count.num_samples
    parts = [f"{number:,} {state}" for state, number in ended.items() if number]
    if balance.in_system:
        parts.append(f"{balance.in_system:,} in the system")
    sign = "=" if balance.issued == balance.in_system + sum(ended.values()) else "≠"
    return f"{balance.issued:,} issued {sign} {' + '.join(parts) or '0'}"
