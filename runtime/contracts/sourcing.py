"""The contract of a class that makes rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.backends.data.own_source.child import UserSource, load_source
from penstock.backends.data.own_source.wire import Draw, Opened, Restore, Tell
from penstock.messages.errors import UserFault
from penstock.messages.flow import RowOutcome

if TYPE_CHECKING:
    from penstock.backends.data.own_source.wire import Done, Order
    from penstock.runtime.contracts.checks import Checks

OUTCOMES = (
    RowOutcome(0, 0.5, False, "", "", (0.0, 1.0)),
    RowOutcome(1, None, True, "", "zero_spread"),
    RowOutcome(0, None, False, "trained"),
    RowOutcome(2, None, False, "failed", "generation_failed"),
    RowOutcome(3, None, False, "requeued", "stale"),
)


def check_source(checks: Checks) -> None:
    """Of rows, states and outcomes. The class is called without options, with the seed 0 where it asks for one."""
    opened = Opened(spec=checks.spec, options={}, seed=0)
    made: list[object] = []
    if not checks.run("it is made without options", lambda: made.append(load_source(opened))):
        return
    checks.run("rows are dicts, at most as many as are asked for", lambda: _check_rows(opened))
    checks.run("a class that is put back makes the same rows", lambda: _check_state(opened))
    checks.run("it takes every kind of outcome", lambda: _check_told(opened))


def _obeyed(opened: Opened, *orders: Order) -> list[Done]:
    async def obey() -> list[Done]:
        source = UserSource(load_source(opened))
        return [await source.obey(order) for order in orders]

    return asyncio.run(obey())


def _check_rows(opened: Opened) -> None:
    if not all(done.rows for done in _obeyed(opened, Draw(1), Draw(3))):
        raise UserFault("it has ended before four rows; a run that wants more than there are ends with it")


def _check_state(opened: Opened) -> str | None:
    first, second = _obeyed(opened, Draw(2), Draw(1))
    _, again = _obeyed(opened, Restore(first.state), Draw(1))
    if again.rows == second.rows:
        return None
    return "other rows came after restore(state): right where they come from outside; else the state lacks something"


def _check_told(opened: Opened) -> None:
    _obeyed(opened, Draw(4), Tell(OUTCOMES), Draw(1))
