"""What every backend is to its shell.

A backend carries out commands and answers with local events. ``execute`` returns at once; the work happens on the
backend's own threads or processes, and every answer goes through ``emit``, which may be called from any thread.
A backend that cannot go on raises from ``execute``, or calls ``fail`` from its thread: its process then ends with
the story, and the supervisor decides.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.messages.local import LocalEvent

if TYPE_CHECKING:
    from penstock.messages.base import Metric

Emit = Callable[[LocalEvent], None]
Fail = Callable[[BaseException], None]
CommandT = TypeVar("CommandT", contravariant=True)


class Capability(StrEnum):
    """What an engine or learner can do; a scenario that demands what is missing is refused with the reason."""

    SEEDED_SAMPLING = "seeded_sampling"
    IN_FLIGHT = "in_flight"
    INTERRUPT = "interrupt"
    STAGED_WEIGHTS = "staged_weights"
    CANARY = "canary"
    RETRACT = "retract"
    """Under ``interrupt`` it holds its requests itself and computes them again under the new weights."""


class Backend(Protocol[CommandT]):
    """The heavy half of an actor."""

    def start(self, emit: Emit, fail: Fail) -> None:
        """Called once, before the first command, on the thread that owns the actor."""
        ...

    def execute(self, command: CommandT, /) -> None:
        """Begin one command; never blocks."""
        ...

    def gauges(self) -> tuple[Metric, ...]:
        """Current figures for metrics and the terminal (``engine/running``, ``engine/occupancy``); cheap."""
        ...

    def close(self, timeout_s: float) -> None:
        """End everything within the time, child processes included. Called once, also after a failure."""
        ...
