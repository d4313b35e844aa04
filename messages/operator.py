"""What an operator asks of a run that goes on, and what the Buffer answers.

The supervisor passes a request on, and says it again until it is answered: to another Buffer too, if the first one is
lost meanwhile. Each says what is to hold, not what is to change, so that hearing it twice does no harm.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.messages.base import Delivery, Event
from penstock.messages.training import OnStale, UpdateMode


class PolicyChanged(Event, frozen=True, kw_only=True):
    """Operator → Buffer: another staleness policy for what is granted from now on."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    policy: str
    max_staleness: int
    update_mode: UpdateMode
    on_stale: OnStale = OnStale.WAIT
    request: int = 0
    """By which the answer is known; 0: nobody waits for one."""


class GrantsPaused(Event, frozen=True, kw_only=True):
    """Operator → Buffer: grant nothing more for training, until the same is said with false. What is granted is
    generated and trained."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    is_paused: bool
    request: int = 0


class SaveAsked(Event, frozen=True, kw_only=True):
    """Operator → Buffer: have what is trained by now saved in a checkpoint."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    request: int = 0


class EnginesAsked(Event, frozen=True, kw_only=True):
    """Operator → Buffer: the run is to have these engines, within ``engines.min`` and ``engines.max``. Under
    ``engines.scale: by_bound`` the supervisor asks so too."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    engines: tuple[str, ...]
    request: int = 0
    reason: str = ""
    """Why, where it was no person who decided it."""


class OperatorAnswered(Event, frozen=True, kw_only=True):
    """Buffer → supervisor: what has become of a request."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    request: int
    accepted: bool
    text: str
    """For people: what holds from here on, or why not."""
    is_final: bool = True
    """False: it is begun, and another answer follows when it is done."""


OperatorEvent = PolicyChanged | GrantsPaused | SaveAsked | EnginesAsked
