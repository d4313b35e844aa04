"""Where the time and the tokens of a run went, as small tables: for the end of a run, ``penstock status`` and the
report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.messages.names import SCORER, is_engine
from penstock.messages.texts import counted
from penstock.runtime.observability.accounting import KILLED_ENGINES, NOT_HANDED_OVER
from penstock.runtime.observability.shares import Shares, shares_text
from penstock.runtime.observability.texts import NOTHING, count_text, duration_text
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from penstock.runtime.observability.accounting import Accounts, LaneAccount, Waste

MAX_ENGINES: Final = 4
"""More of them share a line."""
LOSSES: Final = {
    KILLED_ENGINES: "never arrived: made by engines since their last report, and killed with them",
    NOT_HANDED_OVER: "never arrived: in requests that were cut off, failed, or were answered twice",
}


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of where the tokens went."""

    what: str
    num_tokens: int
    share: str
    """Of what was generated; empty for what was not counted."""
    cost: str
    """Device time of engines; empty for what was of use."""
    is_estimate: bool = False


def accounts_tables(accounts: Accounts) -> Group:
    """Both tables for the terminal; nothing where nothing is known."""
    parts: list[RenderableType] = []
    if accounts.lanes:
        parts.append(_time_table(accounts))
    if accounts.tokens.generated or accounts.tokens.lost:
        parts.append(_token_table(accounts))
    return Group(*parts)


def time_rows(accounts: Accounts) -> Iterator[tuple[str, str]]:
    """Each lane, or all engines together where there are many, and its states in percent of the wall time."""
    engines = [lane for lane in accounts.lanes if is_engine(lane.name)]
    is_short = len(engines) <= MAX_ENGINES
    for lane in accounts.lanes:
        if is_short or not is_engine(lane.name):
            yield lane.name, _lane_text([lane])
        elif lane is engines[0]:
            yield counted(len(engines), "engine"), _lane_text(engines)


def token_rows(accounts: Accounts) -> Iterator[TokenRow]:
    """What was trained first, then the waste, what is in the system, and the estimates."""
    tokens = accounts.tokens
    for what, number in (("trained", tokens.trained), ("evaluated", tokens.evaluated)):
        if number:
            yield TokenRow(what=what, num_tokens=number, share=_share(number, tokens.generated), cost="")
    for waste in tokens.wasted:
        cause = f" ({terminal_text(waste.cause)})" if waste.cause else ""
        text = f"wasted: {waste.state}{cause}"
        share = _share(waste.num_tokens, tokens.generated)
        yield TokenRow(what=text, num_tokens=waste.num_tokens, share=share, cost=_cost(waste))
    if tokens.in_system:
        share = _share(tokens.in_system, tokens.generated)
        yield TokenRow(what="in the system", num_tokens=tokens.in_system, share=share, cost="")
    if tokens.remainder:
        yield TokenRow(what="NOT ACCOUNTED FOR", num_tokens=tokens.remainder, share="", cost="")
    for waste in tokens.lost:
        yield TokenRow(
            what=LOSSES[waste.cause], num_tokens=waste.num_tokens, share="", cost=_cost(waste), is_estimate=True
        )


def _time_table(accounts: Accounts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("where the time went", no_wrap=True)
    table.add_column(f"of {duration_text(accounts.wall_s)}", overflow="fold")
    for name, text in time_rows(accounts):
        table.add_row(escape(name), text)
    return table


def _token_table(accounts: Accounts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True, padding=(0, 2, 0, 0))
    table.add_column("where the tokens went", footer="generated", overflow="fold")
    table.add_column("tokens", justify="right", footer=count_text(accounts.tokens.generated), no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("engine time", justify="right", no_wrap=True)
    for row in token_rows(accounts):
        about, style = ("≈ ", "dim") if row.is_estimate else ("", "")
        table.add_row(
            Text(row.what),
            f"{about}{count_text(row.num_tokens)}",
            row.share or NOTHING,
            row.cost or NOTHING,
            style=style,
        )
    return table


def _lane_text(lanes: list[LaneAccount]) -> str:
    total = Shares()
    for lane in lanes:
        for activity, seconds in lane.seconds.items():
            total.seconds[activity] += seconds
        total.occupied_s += lane.occupied_s
    missing_s = sum(lane.remainder_s for lane in lanes)
    whole_s = sum(lane.wall_s for lane in lanes)
    text = shares_text(total, "workers" if lanes[0].name == SCORER else "slots")
    is_small = missing_s <= 0.005 * whole_s  # both are 0 for a lane of which nothing was reported yet
    return text if is_small else f"{text}; {100 * missing_s / whole_s:.1f} % not reported yet"


def _share(number: int, total: int) -> str:
    return f"{100 * number / max(1, total):.1f} %"


def _cost(waste: Waste) -> str:
    return duration_text(waste.device_s)
