"""The one form that all seven actors have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from penstock.messages.base import Metric
    from penstock.messages.books import BooksSnapshot
    from penstock.messages.commands import AnyCommand
    from penstock.messages.membership import HeldLease
    from penstock.messages.training import Activity
    from penstock.messages.waits import Wait

EventT = TypeVar("EventT", contravariant=True)


class Machine(Protocol[EventT]):
    """A state machine: events in, commands out.

    ``handle`` is the only door to the state. It is synchronous and pure but for its own state: the same state and
    the same event give the same commands.
    """

    def handle(self, event: EventT, /) -> list[AnyCommand]:
        """Take one event; return what is to be done, in order."""
        ...

    def validate(self) -> None:
        """Assert every invariant of the state. Tests call it after each event."""
        ...

    def leases(self) -> tuple[HeldLease, ...]:
        """The samples that this actor works on itself (what it sent on and keeps is the runtime's to answer)."""
        ...

    def waits(self) -> tuple[Wait, ...]:
        """What it waits for now, and who can end it; few of each kind, those that were there first."""
        ...

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Running totals of what only it can count."""
        ...

    @property
    def state(self) -> str:
        """One word for people: what the actor does now."""
        ...


class Accounted(Protocol):
    """What the machine of an actor that has a lane says about its time."""

    @property
    def shows(self) -> tuple[Activity, float, float]:
        """What the time is spent on now; running ÷ capacity; waiting for tools, environments and agents ÷ capacity."""
        ...


@runtime_checkable
class Snapshotting(Protocol):
    """A machine that need not be built from every entry of its ledger."""

    def snapshot(self) -> BooksSnapshot | None:
        """Of what its entries so far come to; None where there can be none."""
        ...
