"""What actors wait for, as they say it themselves: the raw material of the wait-for graph."""

from __future__ import annotations

from typing import ClassVar, Final

from penstock.messages.base import Delivery, Event, Value

OWN_BACKEND: Final = "backend"
"""As ``Wait.on``: what carries out the actor's own commands."""
OPERATOR: Final = "operator"
"""As ``Wait.on``: whoever started the run, or looks after it."""


_WAITS_FOR: Final = "waits for "


def waiting_state(what: str, waited_s: float) -> str:
    """As ``ActorReported.state`` of an engine that has no process yet, since ``what`` it takes has still to come."""
    return f"{_WAITS_FOR}{what}, for {waited_s:.0f} s"


def is_waiting(state: str) -> bool:
    """Whether a state is one of :func:`waiting_state`."""
    return state.startswith(_WAITS_FOR)


class Wait(Value, frozen=True, array_like=True):
    """One thing that an actor waits for."""

    what: str
    """In words that the subject completes: ``sample``, ``receipt of``, ``answer to``."""
    subject: str
    """Which one: ``12/3``, ``batch 7``, ``version 4``. Everyone calls the same thing by the same name."""
    on: str
    """Who can end it: an actor, or ``OWN_BACKEND``."""
    mark: int = 0
    """Changes whenever it comes closer to its end, which begins it anew: tokens so far, samples that are here."""
    num: int = 1
    """So many of this kind, of which this is the one that was there first among those not named."""


class OverdueWait(Value, frozen=True, array_like=True):
    """One that has lasted too long."""

    wait: Wait
    since_s: float
    """When it was first seen like this, in seconds since the start of the run."""


class WaitsReported(Event, frozen=True, kw_only=True):
    """Any actor → supervisor: everything that it has waited for too long now; nothing, when that is over."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    name: str
    epoch: int
    at_s: float
    waits: tuple[OverdueWait, ...]
