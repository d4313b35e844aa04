"""What a process is started with, and what it leaves behind."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from penstock.backends.processes.curve import KeyPair
from penstock.messages.base import Value
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.shell.watchdog import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    import msgspec

    from penstock.actors.machine import Machine
    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.processes.remote_ranks import RemoteRanks
    from penstock.backends.protocol import Backend, Timers
    from penstock.messages.base import Event
    from penstock.messages.books import KeptBooks
    from penstock.messages.ledger import LedgerEntry


class Wiring(Protocol):
    """The module that says what each name stands for; :mod:`penstock.runtime.run.wiring` for the seven actors."""

    RunPlan: type[msgspec.Struct]
    """What every process of a run knows about it; travels as msgpack."""

    def build_machine(
        self,
        name: str,
        plan: Any,  # noqa: ANN401 - of the wiring
        /,
        *,
        epoch: int,
        records: Iterable[LedgerEntry] = (),
        kept: KeptBooks | None = None,
    ) -> Machine[Any]:
        """The actor of this name. The Buffer gets the ledger's entries and goes on where they end; ``kept`` is what
        spares it the most of them."""
        ...

    def open_backend(
        self,
        name: str,
        plan: Any,  # noqa: ANN401
        /,
        *,
        epoch: int,
        timers: Timers,
        store: LedgerStore | None,
        host: str,
        remote_ranks: RemoteRanks | None,
        takes_over: bool,
    ) -> Backend[Any] | None:
        """What carries out its commands, not started yet; None when it has none. Simulated ones run on ``timers``, that
        of the Buffer reads ``store``, and one that others call by itself listens at ``host``;
        an engine or a learner over several nodes starts its other processes by ``remote_ranks``; ``takes_over`` is of
        :class:`Boot`."""
        ...

    def hears(self, name: str, /) -> frozenset[type[Event]]:
        """The classes of events that its ``handle`` takes."""
        ...

    def inbox_union(self, name: str, /) -> Any:  # noqa: ANN401 - a type form
        """The union of the events that others may send it."""
        ...


def load_wiring(module: str) -> Wiring:
    """The wiring of this name. Imports it, and with it what the actors need."""
    return cast("Wiring", importlib.import_module(module))


class Boot(Value, frozen=True, kw_only=True):
    """Everything that a process is started with."""

    run_id: str
    run_folder: str
    started_unix_s: float
    """Start of the run; the clocks of all actors count from here."""
    name: str
    epoch: int
    names: tuple[str, ...]
    """Every actor of the run. A frame of anybody else is malformed."""
    supervisor: Address
    client_keys: KeyPair | None
    """None: nothing is encrypted."""
    host: str | None
    """Address to bind to; None takes that of the node."""
    heartbeat_s: float
    resend_after_s: float
    overdue_after_s: float = NEVER
    """Waits that last so long are reported."""
    takes_over: bool = False
    """The incarnation before it was lost by its process alone, which ended, stood still or was not heard: what that has
    left running is not suspect, and may be taken over. Not so where somebody asked for its replacement."""
    notice_s: float | None = None
    """Of an engine: it has so long from word that its machine is taken. None: there is no such word."""
    notice_file: str | None = None
    notice_url: str | None = None
    validate: bool
    trace_salt: bytes
    """What the ids of traces are made from; empty when nothing is traced."""
    trace_fraction: float
    otlp_endpoint: str | None
    segment_bytes: int = 0
    """From what size on a file of events or spans is closed and the next one begun; 0: never."""
    records: bool = False
    """What the actor handles is recorded whole."""
    wiring: str
    """Module with a :class:`Wiring`."""
    plan: bytes
    """The ``RunPlan`` of the wiring, as msgpack."""


OBSERVING: Final = tuple(
    f"penstock.runtime.observability.{name}" for name in ("event_observer", "span_export", "stages", "trackers")
)
"""Modules that every actor imports late, so that its process is announced before; a warm one has them already."""
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


class EndKind(StrEnum):
    """How the loop of a process ended."""

    ASKED = "asked"
    """The supervisor asked for it."""
    DISMISSED = "dismissed"
    """It learned that it had been given up."""
    CRASHED = "crashed"
    """An exception in the actor, in its backend or in the host."""
    USER_ERROR = "user_error"
    """Something that the user gave cannot be used; starting again would end the same."""
    DIVERGED = "diverged"
    """The training has; starting again would end the same."""
    LEDGER_FAILED = "ledger_failed"
    """The ledger could not be written or read; starting again would end the same."""
    DISK_FULL = "disk_full"
    """There is no room for what it has to write; starting again would end the same."""
    SUPERSEDED = "superseded"
    """Somebody else has claimed the ledger since."""


class ProcessEnd(Value, frozen=True, kw_only=True):
    """What ``run`` of a process returns."""

    kind: EndKind
    error: str = ""
    """Class and message of the exception, one line."""
    traceback: str = ""
