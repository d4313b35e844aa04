"""The shell of one actor, the same on both hosts: what comes in is fenced, deduplicated and handled; what the actor
returns is recorded, then sent, timed and executed.

Invariants:

* A host calls a shell from one thread. Within a turn it hands in any number of events, then calls ``end_turn``.
* No effect of a turn happens before every record of that turn is durable.
* An event of a fenced incarnation never reaches the actor. The first event of a higher epoch changes the membership
  before it is handled.
* What is said once to an incarnation that is known and cannot be reached yet waits until it can.
* A timer that an event starts anew or stops does not fire later in the same turn.
* What the actor has waited for too long is told to the supervisor (:mod:`penstock.runtime.shell.watchdog`).
* The shell reads no clock but its host's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args

import msgspec

from penstock.messages.base import CONTROL, LOSSY, Event, Metric
from penstock.messages.commands import FailRun, Record, ReplaceActor, Send, StartTimer, StopTimer
from penstock.messages.local import Started, TimerFired
from penstock.messages.membership import ActorEpoch, EngineLeaving, LeasesAsked, LeasesHeld, LineRestored
from penstock.messages.names import SUPERVISOR
from penstock.messages.waits import WaitsReported
from penstock.messages.wire import Envelope, Header
from penstock.runtime.shell.delivery import Delivery, Outgoing
from penstock.runtime.shell.membership import Membership
from penstock.runtime.shell.watchdog import NEVER, Watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

    from penstock.actors.machine import Machine
    from penstock.messages.commands import AnyCommand, BackendCommand
    from penstock.messages.ledger import LedgerEntry

MAX_TIMERS_A_TURN: Final = 1024
_NOT_OF_BACKENDS: Final = frozenset((Send, Record, StartTimer, StopTimer, ReplaceActor, FailRun))
IDLE_S: Final = 60.0
"""A shell without timers that keeps nothing still wakes after this time."""


class Host(Protocol):
    """What a shell needs of the machine it runs on, real or virtual."""

    def now_s(self) -> float:
        """Seconds since the start of the run; never goes back."""
        ...

    def commit(self, entries: Sequence[LedgerEntry]) -> None:
        """Durable when it returns. Only the Buffer's shell calls it."""
        ...

    def transmit(self, to: str, envelopes: list[Envelope]) -> None:
        """Send one pack to one peer; drops it when the peer is not there."""
        ...

    def execute(self, command: BackendCommand) -> None:
        """Begin a command of the backend; its answers come back through ``Shell.on_local``."""
        ...

    def ask_supervisor(self, command: ReplaceActor | FailRun) -> None:
        """Hand a request to whoever starts and ends processes."""
        ...


class Observer(Protocol):
    """Who watches a shell: traces, event log, tests. Nothing that it does changes what the actor does."""

    def handled(self, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """After each event that reached the actor; the header is None for local events."""
        ...

    def failed(self, event: Event, header: Header | None, error: Exception) -> None:
        """The actor has raised on this event, and its process ends."""
        ...


class ShellSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one shell behaves."""

    name: str
    epoch: int
    heartbeat_s: float = 1.0
    """How often overdue events are looked for."""
    resend_after_s: float = 5.0
    overdue_after_s: float = NEVER
    """A wait that lasts so long is reported to the supervisor."""
    keeps_encoded: bool = False
    """The host sends bytes: data events are encoded once and kept so until they are settled."""
    validate: bool = False
    """Assert the actor's invariants after every event."""


def classes_of(union: Any) -> frozenset[type[Event]]:  # noqa: ANN401 - a type form
    """The event classes of an inbox union."""
    return frozenset(get_args(union) or (union,))


class Shell:
    """One incarnation of one actor, with its delivery, membership and timers."""

    __slots__ = (
        "_effects", "_hears", "_host", "_ids", "_links", "_next_beat_s", "_next_watch_s", "_observer", "_packs",
        "_reachable", "_received", "_records", "_timer_heap", "_timer_ids", "_timers", "_unreached",
        "_validates", "_watchdog", "delivery", "is_leaving", "machine", "membership", "num_fenced", "num_gaps",
        "settings",
    )  # fmt: skip

    def __init__(
        self,
        machine: Machine[Any],
        host: Host,
        *,
        settings: ShellSettings,
        hears: frozenset[type[Event]],
        observer: Observer | None = None,
    ) -> None:
        self.machine = machine
        self.settings = settings
        self.delivery = Delivery(resend_after_s=settings.resend_after_s, keeps_encoded=settings.keeps_encoded)
        self.membership = Membership()
        self.num_fenced = 0
        self.num_gaps = 0
        self._validates = settings.validate
        self._host = host
        self._hears = hears
        self._observer = observer
        self._ids = itertools.count(1)
        self._effects: list[tuple[list[AnyCommand], int]] = []
        self._records: list[LedgerEntry] = []
        self._packs: defaultdict[str, list[Outgoing]] = defaultdict(list)
        self._links: defaultdict[str, int] = defaultdict(int)
        self._received: dict[str, int] = {}
        """By sender, the last number of what came on the link from its present incarnation."""
        self._reachable: dict[str, int] = {}
        self._unreached: dict[str, list[Outgoing]] = {}
        """By peer whose first frame came before the word on where it is, the lossy events to it. What is kept until
        settled, and the newest of each class, it hears again anyway."""
        self._timers: dict[str, int] = {}
        self._timer_heap: list[tuple[float, int, str]] = []
        self._timer_ids = itertools.count(1)
        self._next_beat_s = 0.0
        self._watchdog = Watchdog(settings.overdue_after_s)
        self._next_watch_s = NEVER
        self.is_leaving = False
        """Of an engine: it has heard that it is to leave the run."""

    # --- what comes in ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first turn of an incarnation."""
        self._next_beat_s = self._host.now_s() + self.settings.heartbeat_s
        self._next_watch_s = self._host.now_s() + self._watchdog.pause_s
        self._handle(Started(epoch=self.settings.epoch), None)

    def on_frame(self, header: Header, event: Event) -> None:
        """One decoded event of a peer."""
        membership, sender, epoch = self.membership, header.sender, header.epoch
        if membership.epoch_of(sender) != epoch:
            if not membership.admits(sender, epoch):
                self.num_fenced += 1
                return
            self._note_member(sender, epoch)
        received, sequence = self._received.get(sender, 0), header.link_sequence
        if sequence > received:  # else it was overtaken, or is a double
            if sequence > received + 1:
                self.num_gaps += 1
            self._received[sender] = sequence
        if type(event) is LeasesAsked:
            self._answer_census(event, header)
        elif self.delivery.accepts(event, sender, epoch, header.message_id):
            self._handle(event, header)

    def on_local(self, event: Event) -> None:
        """An answer of the backend."""
        self._handle(event, None)

    def on_returned(self, name: str, epoch: int) -> None:
        """The supervisor says that this incarnation is reachable. Repeating it is harmless. A host tells a new shell of
        everyone before it calls ``start``."""
        if name == self.settings.name or not self.membership.admits(name, epoch):
            return
        self._note_member(name, epoch)
        if self._reachable.get(name, -1) < epoch:
            self._reachable[name] = epoch
            self._queue(self.delivery.returned(name, self._host.now_s()))
            self._queue(self._unreached.pop(name, []))

    def on_lost(self, name: str, epoch: int) -> None:
        """The supervisor has given this incarnation up."""
        if name == self.settings.name:
            return
        for event in self.membership.lost(name, epoch):
            self._unreached.pop(name, None)
            self._handle_if_heard(event)

    def on_leaving(self, name: str, epoch: int) -> None:
        """The supervisor says that this engine is to leave. Repeating it is harmless."""
        if name != self.settings.name:
            for event in self.membership.leaves(name, epoch):
                self._handle_if_heard(event)
        elif epoch == self.settings.epoch and not self.is_leaving:
            self.is_leaving = True
            self._handle_if_heard(EngineLeaving(name=name, epoch=epoch))

    def next_timer_s(self) -> float:
        """When ``fire_timers`` is due next, on the host's clock."""
        heap = self._timer_heap
        while heap and self._timers.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        # Asked after every turn: comparisons cost a fifth of calls of min and max.
        beat_s, due_s = self._next_beat_s, self.delivery.next_due_s
        if due_s > beat_s:
            beat_s = due_s if due_s < beat_s + IDLE_S else beat_s + IDLE_S
        if self._next_watch_s < beat_s:
            beat_s = self._next_watch_s
        return heap[0][0] if heap and heap[0][0] < beat_s else beat_s

    def fire_timers(self) -> None:
        """Handle every timer that has run out, and look for what is overdue."""
        now_s = self._host.now_s()
        for _ in range(MAX_TIMERS_A_TURN):
            if not self._timer_heap or self._timer_heap[0][0] > now_s:
                break
            _, timer_id, key = heapq.heappop(self._timer_heap)
            if self._timers.get(key) == timer_id:
                del self._timers[key]
                self._handle(TimerFired(key=key), None)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.settings.heartbeat_s
            self._queue(self.delivery.overdue(now_s))
        if now_s >= self._next_watch_s:
            self._next_watch_s = now_s + self._watchdog.pause_s
            self._watch(now_s)

    def on_line_restored(self, name: str) -> None:
        """The line to a peer carries again after it was cut: what was said meanwhile need not wait for its turn."""
        self._queue(self.delivery.returned(name, self._host.now_s()))
        self._handle_if_heard(LineRestored(name=name))

    def retrace(self, event: Event, header: Header | None) -> list[AnyCommand]:
        """Take an event that a recorded incarnation has handled, at the time that the host's clock shows: actor,
        delivery, membership and timers come to stand as they did. Nothing is sent, recorded or executed.

        Returns:
            What the actor asked for. Whoever goes on from here says with ``on_returned`` who can be reached, and so has
            everything said again that is kept.
        """
        if header is not None:
            self.membership.returned(header.sender, header.epoch)
            self.delivery.accepts(event, header.sender, header.epoch, header.message_id)
        self.is_leaving |= self.membership.note(event, own_name=self.settings.name)
        if isinstance(event, TimerFired):
            self._timers.pop(event.key, None)
        commands = self.machine.handle(event)
        for command in commands:
            if isinstance(command, StartTimer | StopTimer):
                self._set_timer(command)
            elif isinstance(command, Send):
                self.delivery.sent(Outgoing(command.to, command.event, next(self._ids)), self._host.now_s())
        return commands

    def say_above(self, message_id: int) -> None:
        """Whatever is said from now on has a higher id than this one, which peers have heard."""
        self._ids = itertools.count(message_id + 1)

    # --- what goes out ----------------------------------------------------------------------------------------

    def end_turn(self) -> bool:
        """Make the turn's records durable, then let its effects happen, one pack for each peer.

        Returns:
            Whether there was anything to do; if not, ``next_timer_s`` is no earlier than before.
        """
        effects = self._effects
        if not (effects or self._packs):
            return False
        if effects:
            self._effects = []
            if self._records:
                records, self._records = self._records, []
                self._host.commit(records)
            now_s = self._host.now_s()
            for commands, cause in effects:
                for command in commands:
                    if type(command) is Send:
                        self._send(command, cause, now_s)
                    elif _is_for_backend(command):
                        self._host.execute(command)
                    elif type(command) is ReplaceActor or type(command) is FailRun:
                        self._host.ask_supervisor(command)
        if self._packs:
            self._transmit()
        return True

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Counters of the shell itself, and of its actor."""
        delivery = self.delivery
        return (
            Metric("delivery/kept", delivery.num_kept),
            Metric("delivery/duplicates", delivery.num_duplicates),
            Metric("delivery/duplicate_tokens", delivery.num_duplicate_tokens),
            Metric("delivery/late", delivery.num_late),
            Metric("delivery/fenced", self.num_fenced),
            Metric("delivery/gaps", self.num_gaps),
            *self.machine.metrics,
        )

    # --- inside -----------------------------------------------------------------------------------------------

    def _handle(self, event: Event, header: Header | None) -> None:
        observer = self._observer
        if observer is None:
            commands = self.machine.handle(event)
        else:
            try:
                commands = self.machine.handle(event)
            except Exception as error:
                observer.failed(event, header, error)
                raise
            observer.handled(event, header, commands)
        if self._validates:
            self.machine.validate()
            self.membership.validate()
        if commands:
            self._effects.append((commands, 0 if header is None else header.message_id))
            for command in commands:
                if type(command) is Send:
                    continue
                if type(command) is Record:
                    self._records += command.entries
                elif type(command) is StartTimer or type(command) is StopTimer:
                    self._set_timer(command)

    def _set_timer(self, command: StartTimer | StopTimer) -> None:
        """At once, not at the end of the turn: what would fire within it is outdated."""
        if isinstance(command, StopTimer):
            self._timers.pop(command.key, None)
        else:
            timer_id = self._timers[command.key] = next(self._timer_ids)
            heapq.heappush(self._timer_heap, (self._host.now_s() + command.delay_s, timer_id, command.key))

    def _handle_if_heard(self, event: Event) -> None:
        if type(event) in self._hears:
            self._handle(event, None)

    def _note_member(self, name: str, epoch: int) -> None:
        events = self.membership.returned(name, epoch)
        if events:
            self._received.pop(name, None)
            if name != SUPERVISOR:
                self._unreached[name] = []
        for event in events:
            self._handle_if_heard(event)

    def _answer_census(self, asked: LeasesAsked, header: Header) -> None:
        for member in asked.lost:
            self.on_lost(member.name, member.epoch)
        for member in asked.members:
            if member.name != self.settings.name:
                self._note_member(member.name, member.epoch)
        leases = self.machine.leases()
        if not asked.with_prefixes:
            leases = tuple(msgspec.structs.replace(lease, prefix=None) if lease.prefix else lease for lease in leases)
        answer = LeasesHeld(
            actor=ActorEpoch(self.settings.name, self.settings.epoch),
            round=asked.round,
            asker_epoch=header.epoch,
            settled_sequence=self.delivery.settled.sequence,
            leases=(*leases, *self.delivery.leases()),
        )
        self._effects.append(([Send(header.sender, answer)], header.message_id))

    def _send(self, send: Send, cause: int, now_s: float) -> None:
        to, event = send.to, send.event
        if type(event) is LeasesAsked:
            event = msgspec.structs.replace(event, lost=self.membership.lost_members())
        outgoing = Outgoing(to, event, next(self._ids), cause)
        self.delivery.sent(outgoing, now_s)
        self._packs[to].append(outgoing)

    def _watch(self, now_s: float) -> None:
        overdue = self._watchdog.look(self.machine.waits(), now_s)
        if overdue is not None:
            settings = self.settings
            report = WaitsReported(name=settings.name, epoch=settings.epoch, at_s=now_s, waits=overdue)
            self._effects.append(([Send(SUPERVISOR, report)], 0))

    def _queue(self, outgoing: list[Outgoing]) -> None:
        for item in outgoing:
            self._packs[item.to].append(item)

    def _transmit(self) -> None:
        """What has been said in this turn, one pack for each peer."""
        packs, self._packs = self._packs, defaultdict(list)
        name, own_epoch, links = self.settings.name, self.settings.epoch, self._links
        for to, outgoing in packs.items():
            if to in self._unreached:
                self._unreached[to] += [item for item in outgoing if item.event.delivery is LOSSY]
                continue
            envelopes: list[Envelope] = []
            sequence = links[to]
            for item in outgoing if len(outgoing) == 1 else _newest(outgoing):
                sequence += 1
                envelopes.append((Header(name, own_epoch, sequence, item.message_id, item.cause), item.event))
            links[to] = sequence
            self._host.transmit(to, envelopes)


def _is_for_backend(command: AnyCommand) -> TypeGuard[BackendCommand]:
    """By its class alone: instance checks of structs that fail cost ten times as much, and most here would."""
    return type(command) not in _NOT_OF_BACKENDS


def _newest(outgoing: list[Outgoing]) -> list[Outgoing]:
    """Without the control events that a later one in the same pack replaces."""
    last: dict[type[Event], Outgoing] = {}
    num_control = 0
    for item in outgoing:
        if item.event.delivery is CONTROL:
            num_control += 1
            last[type(item.event)] = item
    if num_control == len(last):  # each of its own class
        return outgoing
    return [item for item in outgoing if item.event.delivery is not CONTROL or last[type(item.event)] is item]
