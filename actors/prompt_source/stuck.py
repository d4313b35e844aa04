"""Which samples stand still although their engine says that it generates them, and whether the engine itself does.

A sample that runs and makes no token between two censuses that are two sweeps of the overdue timer apart stands still.
One that waits for new weights does not: whoever brings them has a deadline of his own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.prompt_source.leases import Lease, LeasedGroup, LeaseState
from penstock.actors.prompt_source.routing import EngineView
from penstock.messages.membership import HeldLease, LeaseStage

if TYPE_CHECKING:
    from penstock.actors.prompt_source.leases import LeaseTable

SWEEPS: Final = 2
"""So many sweeps without a token."""


class StuckEngine(msgspec.Struct):
    """One engine with samples that stand still."""

    view: EngineView
    leases: list[tuple[LeasedGroup, Lease]]
    does_something: bool
    """Whether it made a token of anything else meanwhile."""


def note_running(lease: Lease, found: HeldLease, sweep: int) -> None:
    """A census has found this sample at its engine."""
    if found.stage is not LeaseStage.RUNNING:
        lease.running_since = None
    elif lease.has(found.num_tokens) or lease.running_since is None:
        lease.running_since = sweep


def find_stuck(table: LeaseTable, sweep: int) -> list[StuckEngine]:
    """After a census: the engines with samples that stand still, in the order of these."""
    found: dict[str, StuckEngine] = {}
    for group, lease in table.all_leases():
        since = lease.running_since
        if since is None or sweep - since < SWEEPS or lease.state is not LeaseState.ISSUED:
            continue
        view = table.router.engines.get(lease.engine)
        if view is not None:
            engine = found.setdefault(view.name, StuckEngine(view, [], does_something=False))
            engine.leases.append((group, lease))
            engine.does_something |= view.progressed >= since
    return list(found.values())
