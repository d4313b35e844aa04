"""One incarnation of one actor on the virtual host: its shell, its backend, its peers, and how it can fail.

Invariants:

* A stopped process does nothing: what arrives waits in its backlog, timers and its backend's answers too.
* A killed process does nothing ever again, and takes with it what it had not carried out.
* A Buffer that another has followed dies when it writes: the ledger refuses its epoch.
* It knows its peers from the supervisor's announcements alone, so what it sends to an incarnation that is gone is lost.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.actors.machine import Snapshotting
from penstock.backends.ledger.protocol import StaleEpochError
from penstock.messages.commands import Record
from penstock.messages.names import SUPERVISOR
from penstock.messages.training import Activity
from penstock.messages.wire import Envelope, InboxDecoder
from penstock.runtime.shell.shell import Observer, Shell, ShellSettings
from penstock.runtime.shell.watchdog import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.actors.machine import Machine
    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Backend, Timers
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand, BackendCommand, FailRun, ReplaceActor
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.local import LocalEvent
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.clock import VirtualClock
    from penstock.runtime.hosts.virtual.links import Links


class Status(Enum):
    """Whether a process does anything."""

    RUNNING = auto()
    STOPPED = auto()
    DEAD = auto()


_RUNNING: Final = Status.RUNNING
"""See :data:`penstock.messages.base.LOSSY`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """What one incarnation is made of: the machine, what it hears, and the backend behind it."""

    machine: Machine[Any]
    hears: frozenset[type[Event]]
    inbox: Any
    """The union of what its socket decodes."""
    backend: Backend[Any] | None = None


class Casting(Protocol):
    """Who plays whom."""

    def __call__(self, name: str, epoch: int, timers: Timers, store: LedgerStore | None) -> Player:
        """A new incarnation of this actor; the Buffer gets the ledger, which it has claimed."""
        ...


class Surroundings(Protocol):
    """What a process needs of its host."""

    @property
    def clock(self) -> VirtualClock: ...
    @property
    def links(self) -> Links: ...
    def open_store(self, process: Process) -> LedgerStore | None:
        """The ledger, claimed for the Buffer; None for everyone else."""
        ...

    def commit(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """Write entries of the ledger.

        Raises:
            StaleEpochError: another incarnation has claimed it.
        """
        ...

    def tell_supervisor(self, process: Process, what: list[Envelope] | ReplaceActor | FailRun) -> None:
        """Hand something to the supervisor."""
        ...

    def died(self, process: Process) -> None:
        """The process has ended."""
        ...

    @property
    def turn_listeners(self) -> Sequence[Callable[[Process], None]]:
        """Who hears that a turn of a process is done."""
        ...


class _KilledError(Exception):
    """Unwinds the turn in which a process dies."""


class Process:
    """A process, as far as its actor can tell. It is its shell's host and its backend's clock."""

    __slots__ = (
        "_answers", "_backlog", "_busy_until_s", "_clock", "_host", "_inbox", "_is_draining", "_links",
        "_timer_s", "_turn_listeners", "_waiting", "backend", "began_s", "died_s", "effects_to_live", "epoch",
        "informed_s", "name", "num_stops", "num_unreadable", "peers", "released_s", "shell", "slowness",
        "snapshot", "start_s", "status", "store", "survives_sigkill", "turn_s",
    )  # fmt: skip

    def __init__(
        self, name: str, epoch: int, host: Surroundings, casting: Casting, settings: ShellSettings, observer: Observer
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.status = Status.RUNNING
        self.peers: dict[str, Process] = {}
        self.slowness = 1.0
        """Its backend takes so many times as long."""
        self.effects_to_live: int | None = None
        """It dies before the effect after so many more."""
        self.turn_s = 0.0
        """How long a turn takes. What arrives meanwhile waits and is taken in together, in one turn."""
        self._busy_until_s = 0.0
        self._waiting: list[tuple[Callable[[Any, Any], None], object]] = []
        self._is_draining = False
        self.num_stops = 0
        self.began_s = host.clock.now_s
        self.start_s: float | None = None
        """From then until what it had to load was loaded; None: it is not yet."""
        self.died_s = math.inf
        """When it was killed."""
        self.released_s = math.inf
        """When nothing is left of it that holds a device."""
        self.survives_sigkill = False
        """It cannot be reached by who gives it up: it stays stopped, and later goes on as a zombie."""
        self.informed_s = 0.0
        """When the last announcement to it arrives."""
        self.num_unreadable = 0
        self._host = host
        self._clock = host.clock
        self._links = host.links
        self._turn_listeners = host.turn_listeners
        self._backlog: list[tuple[Callable[[Any, Any], None], object]] = []
        self._answers: deque[LocalEvent] = deque()
        self._timer_s = NEVER
        self.store = host.open_store(self)
        player = casting(name, epoch, self, self.store)
        self.backend = player.backend
        machine, keeps_books = player.machine, self.store is not None
        self.snapshot = machine.snapshot if keeps_books and isinstance(machine, Snapshotting) else None
        """See :class:`.Snapshotting`."""
        self.shell = Shell(player.machine, self, settings=settings, hears=player.hears, observer=observer)
        self._inbox = player.inbox

    # --- its shell's host -------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Virtual seconds since the start of the run."""
        return self._clock.now_s

    def commit(self, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`penstock.runtime.shell.shell.Host`."""
        self._live_on()
        try:
            self._host.commit(self, entries)
        except StaleEpochError as error:
            raise _KilledError from error  # a real process ends here too

    def transmit(self, to: str, envelopes: list[Envelope]) -> None:
        """See :class:`penstock.runtime.shell.shell.Host`."""
        if self.effects_to_live is not None:
            self._live_on()
        peer = self.peers.get(to)
        if peer is not None:
            self._links.send(self.name, to, peer, envelopes, deliver)
        elif to == SUPERVISOR:
            self._host.tell_supervisor(self, envelopes)

    def execute(self, command: BackendCommand) -> None:
        """See :class:`penstock.runtime.shell.shell.Host`."""
        if self.effects_to_live is not None:
            self._live_on()
        if self.backend is None:
            raise RuntimeError(f"{self.name} has no backend to carry out {type(command).__name__}")
        self.backend.execute(command)

    def ask_supervisor(self, command: ReplaceActor | FailRun) -> None:
        """See :class:`penstock.runtime.shell.shell.Host`."""
        self._live_on()
        self._host.tell_supervisor(self, command)

    def _live_on(self) -> None:
        if self.effects_to_live is None:
            return
        if self.effects_to_live == 0:
            raise _KilledError
        self.effects_to_live -= 1

    # --- its backend's clock ----------------------------------------------------------------------------------

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """See :class:`penstock.backends.protocol.Timers`."""
        self._clock.at(self._clock.now_s + delay_s * self.slowness, call, self, callback)

    # --- life and death ---------------------------------------------------------------------------------------

    def start(self, directory: Callable[[Process], None]) -> None:
        """The first turn; ``directory`` tells the process whom it can reach and who is fenced."""
        if self.backend is not None:
            self.backend.start(self._answers.append, self._fail)
        directory(self)
        self.shell.start()
        self.finish_turn()

    def begin_retracing(self) -> None:
        """It stands in for a recorded process: what that handled comes through :meth:`retrace`, and then it goes on."""
        if self.backend is not None:
            self.backend.start(self._answers.append, self._fail)

    def retrace(self, event: Event, header: Header | None) -> list[AnyCommand]:
        """See :meth:`penstock.runtime.shell.shell.Shell.retrace`; what the Buffer records is in the ledger again."""
        commands = self.shell.retrace(event, header)
        if self.store is not None:
            for command in commands:
                if isinstance(command, Record):
                    self.store.commit(command.entries)
        return commands

    def stop(self) -> None:
        """SIGSTOP."""
        if self.status is Status.RUNNING:
            self.status = Status.STOPPED
            self.num_stops += 1

    def go_on(self) -> None:
        """SIGCONT: everything that waited happens now, in order."""
        if self.status is not Status.STOPPED:
            return
        self.status = Status.RUNNING
        backlog, self._backlog = self._backlog, []
        for act, what in backlog:
            self._clock.at(self._clock.now_s, act, self, what)

    def kill(self) -> None:
        """SIGKILL."""
        if self.status is not Status.DEAD:
            self.status = Status.DEAD
            self.died_s = self.released_s = self._clock.now_s
            self._backlog.clear()
            self._host.died(self)

    def _fail(self, error: BaseException) -> None:
        raise error

    # --- turns ------------------------------------------------------------------------------------------------

    def is_up(self, act: Callable[[Any, Any], None], what: object) -> bool:
        """Whether it can do this now; a busy or stopped process does it later, a dead one never. Of one that runs, and
        whose turns take no time, it need not be asked."""
        if self.status is not _RUNNING:
            return self._is_awake(act, what)
        if self._clock.now_s >= self._busy_until_s or self._is_draining:
            return True
        if not self._waiting:
            self._clock.at(self._busy_until_s, drain, self, None)
        self._waiting.append((act, what))
        return False

    def _is_awake(self, act: Callable[[Any, Any], None], what: object) -> bool:
        if self.status is Status.STOPPED:
            self._backlog.append((act, what))
        return self.status is Status.RUNNING

    def drain(self) -> None:
        """Take in at once what came while a turn lasted."""
        if not self._is_awake(drain, None):
            return
        waiting, self._waiting = self._waiting, []
        self._is_draining = True
        for act, what in waiting:
            act(self, what)
        self._is_draining = False
        self.finish_turn()

    def decode(self, frame: bytes) -> list[Envelope]:
        """As its socket would; what cannot be read is counted and dropped."""
        events, errors = _decoder_of(self._inbox).decode(frame)
        self.num_unreadable += len(errors)
        return events

    def finish_turn(self) -> None:
        """Carry out what the turn has brought, and take in what the backend answered at once."""
        if self._is_draining:
            return
        if self.turn_s:
            self._busy_until_s = self._clock.now_s + self.turn_s
        shell, answers, may_be_earlier = self.shell, self._answers, self._timer_s == NEVER
        try:
            while True:
                while answers:
                    shell.on_local(answers.popleft())
                if shell.end_turn():
                    may_be_earlier = True
                if not answers:
                    break
        except _KilledError:
            self.kill()
            return
        if self.start_s is None and not _starts(shell.machine):
            self.start_s = self._clock.now_s - self.began_s
        for turned in self._turn_listeners:
            turned(self)
        if may_be_earlier and (due_s := shell.next_timer_s()) < self._timer_s:
            self._timer_s = due_s
            self._clock.at(due_s, fire, self, due_s)

    def finish_if_answered(self) -> None:
        """A callback is over. One that answers nothing was no turn: an engine is woken for a moment that has passed a
        third of the time."""
        if self._answers:
            self.finish_turn()

    def fire_timers(self, due_s: float) -> None:
        """The clock has come to a moment for which a timer was set."""
        if due_s != self._timer_s:
            return  # an earlier one took its place
        self._timer_s = NEVER
        if self.shell.next_timer_s() <= self._clock.now_s:
            self.shell.fire_timers()
        self.finish_turn()


def _starts(machine: Machine[Any]) -> bool:
    """Whether it loads what it has to; an actor whose time is not accounted loads nothing."""
    activity, *_ = getattr(machine, "shows", (None,))
    return activity is Activity.STARTING


@cache
def _decoder_of(inbox: Any) -> InboxDecoder[Event]:  # noqa: ANN401 - a type form
    """One for all processes that hear the same; none is made where packs travel as they are."""
    return InboxDecoder(inbox)


def deliver(process: Process, what: list[Envelope] | bytes) -> None:
    """A pack arrives."""
    if (process.status is not _RUNNING or process.turn_s) and not process.is_up(deliver, what):
        return  # spelt out, here and below, as it is asked of all that happens
    pack = what if isinstance(what, list) else process.decode(what)
    on_frame = process.shell.on_frame
    for header, event in pack:
        on_frame(header, event)
    process.finish_turn()


def hear_restored(process: Process, peer: str) -> None:
    """The line to a peer carries again."""
    if process.is_up(hear_restored, peer):
        process.shell.on_line_restored(peer)
        process.finish_turn()


def drain(process: Process, _: None) -> None:
    """A turn is over, and things have come meanwhile."""
    process.drain()


def call(process: Process, callback: Callable[[], None]) -> None:
    """A callback of the backend falls due."""
    if (process.status is not _RUNNING or process.turn_s) and not process.is_up(call, callback):
        return
    callback()
    process.finish_if_answered()


def fire(process: Process, due_s: float) -> None:
    """A timer of the shell falls due."""
    if process.is_up(fire, due_s):
        process.fire_timers(due_s)
