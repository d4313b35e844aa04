"""The virtual host: the same shells and actors as on real machines, in one process, on a clock that takes no time.

Invariants:

* The same casting, models, seed and faults give the same run, event for event; the digest of the log says so.
* An error in an actor or in a backend is never a loss to recover from here: it ends the run with its traceback, and
  with what everyone was doing as a note.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.backends.ledger.memory import MemoryLedger, MemoryStore
from penstock.messages.commands import ReplaceActor
from penstock.messages.membership import EngineEmptied, EnginesWanted
from penstock.messages.names import BUFFER, SUPERVISOR
from penstock.messages.training import RunFinished
from penstock.messages.wire import Envelope, Header
from penstock.runtime.hosts.virtual.clock import VirtualClock
from penstock.runtime.hosts.virtual.links import LinkModel, Links
from penstock.runtime.hosts.virtual.process import Casting, Process, Status, deliver
from penstock.runtime.hosts.virtual.scaling import Scaling
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel, Supervisor
from penstock.runtime.shell.engine_scaling import ScalingSettings
from penstock.runtime.shell.shell import ShellSettings
from penstock.runtime.shell.watchdog import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand, FailRun
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.hosts.virtual.event_digest import EventDigest


class Watcher(Protocol):
    """Who watches a whole run from outside. Nothing that it does changes the run."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """An event reached an actor, which wants these things done."""
        ...

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """These entries of the ledger are durable."""
        ...

    def heard(self, process: Process, event: Event) -> None:
        """The supervisor has heard this."""
        ...

    def turned(self, process: Process) -> None:
        """A process has done what its turn brought."""
        ...

    def lost(self, name: str, cause: str) -> None:
        """An actor was given up, and will be replaced or done without."""
        ...


class IdleWatcher(Watcher):
    """Looks at nothing: what watchers are made of, each with the methods that it needs."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        return

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        return

    def heard(self, process: Process, event: Event) -> None:
        return

    def turned(self, process: Process) -> None:
        return

    def lost(self, name: str, cause: str) -> None:
        return


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one virtual host behaves."""

    seed: int = 0
    link: LinkModel = LinkModel()
    supervision: SupervisionModel = SupervisionModel()
    heartbeat_s: float = 1.0
    resend_after_s: float = 5.0
    overdue_after_s: float = NEVER
    turn_s: float = 0.0
    """How long a turn of any process takes; what arrives meanwhile is taken in together."""
    scaling: ScalingSettings | None = None
    """``engines.scale: by_bound``; None: nobody but an operator changes the engines."""
    validate: bool = False
    """Assert the invariants of every actor after every event."""
    is_brief: bool = False
    """Nobody will follow the Buffer, so most of what it writes is let go: see :class:`.MemoryLedger`."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    at_s: float
    completed: bool
    story: str
    finished: RunFinished | None = None
    """What the Buffer said, if it said anything."""


class VirtualHost:
    """One run of these actors."""

    def __init__(
        self,
        names: Sequence[str],
        casting: Casting,
        settings: HostSettings | None = None,
        *,
        digest: EventDigest | None = None,
    ) -> None:
        self.names = tuple(names)
        self.settings = settings = settings or HostSettings()
        self.clock = VirtualClock()
        self.links = Links(settings.link, self.clock, seed=settings.seed)
        self.supervisor = Supervisor(
            settings.supervision,
            self.clock,
            seed=settings.seed + 1,
            spawn=self._spawn,
            fail_run=self._fail_run,
            on_lost=self._on_lost,
            tell=lambda event: self.say(BUFFER, event),
        )
        self.ledger = MemoryLedger(is_brief=settings.is_brief)
        """On a disk that nothing breaks."""
        self.ending: Ending | None = None
        self.num_events = 0
        """Events that reached an actor."""
        self._casting = casting
        self._digest = digest
        self._watchers: list[Watcher] = []
        self._event_watchers: list[Watcher] = []
        self.turn_listeners: list[Callable[[Process], None]] = []
        """See :class:`penstock.runtime.hosts.virtual.process.Surroundings`."""
        self._message_ids = itertools.count(1)
        self._scaling = None
        if settings.scaling is not None:
            self._scaling = Scaling(
                settings.scaling,
                self.clock,
                heartbeat_s=settings.heartbeat_s,
                ask=lambda event: self.say(BUFFER, event),
            )
            self.turn_listeners.append(self._scaling.turned)
        for name in self.names:
            self.supervisor.start(name)

    def watch(self, watcher: Watcher, *, events: bool = True) -> None:
        """From now on this one watches too; without ``events`` it is not told what the actors handle."""
        self._watchers.append(watcher)
        self.turn_listeners.append(watcher.turned)
        if events:
            self._event_watchers.append(watcher)

    def run(self, until_s: float) -> Ending | None:
        """Go on until the run ends or the clock shows ``until_s``; how it ended, or None when it has not."""
        try:
            self.clock.run(until_s)
        except BaseException as error:
            error.add_note(f"at {self.clock.now_s:.3f} s of virtual time\n{self.story()}")
            raise
        return self.ending

    def say(self, to: str, event: Event) -> None:
        """The supervisor says something to an actor; nothing of it is lost while the actor lives."""
        process = self.supervisor.processes.get(to)
        if process is not None:
            message_id = next(self._message_ids)
            header = Header(SUPERVISOR, 0, message_id, message_id, 0)
            self.clock.at(self.clock.now_s, deliver, process, [(header, event)])

    def lose_machine(self) -> None:
        """Every process is gone at once, with all that was on its way; somebody resumes the run."""
        for name in self.supervisor.forget_all():
            self._on_lost(name, "the machine was lost")
        if self._scaling is not None:
            self._scaling.machine_lost()
        for name in self.names:
            self.supervisor.start(name, self.supervisor.first_epoch)

    def fail(self, story: str) -> None:
        """End the run here, for this reason."""
        self._fail_run(story)

    def story(self) -> str:
        """What everyone is doing: the first thing to read when a run stands still."""
        return "\n".join(_line(process) for _, process in sorted(self.supervisor.processes.items()))

    def stand_in(self, name: str, epoch: int) -> Process:
        """A process in the place of a recorded one, which nobody knows of yet: see
        :meth:`penstock.runtime.hosts.virtual.supervisor.Supervisor.adopt`."""
        return self._spawn(name, epoch)

    # --- what processes need ----------------------------------------------------------------------------------

    def open_store(self, process: Process) -> LedgerStore | None:
        """See :class:`penstock.runtime.hosts.virtual.process.Surroundings`."""
        if process.name != BUFFER:
            return None
        store = MemoryStore(self.ledger)
        store.claim(process.epoch)
        return store

    def commit(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.process.Surroundings`."""
        if process.store is not None:
            process.store.commit(entries, process.snapshot)
        if self._digest is not None:
            self._digest.record(entries)
        for watcher in self._watchers:
            watcher.committed(process, entries)

    def tell_supervisor(self, process: Process, what: list[Envelope] | ReplaceActor | FailRun) -> None:
        """See :class:`penstock.runtime.hosts.virtual.process.Surroundings`."""
        self.clock.at(self.clock.now_s + self.settings.link.min_delay_s, _hear, self, (process, what))

    def died(self, process: Process) -> None:
        """See :class:`penstock.runtime.hosts.virtual.process.Surroundings`."""
        self.supervisor.died(process)

    # --- inside -----------------------------------------------------------------------------------------------

    def _spawn(self, name: str, epoch: int) -> Process:
        settings = ShellSettings(
            name=name,
            epoch=epoch,
            heartbeat_s=self.settings.heartbeat_s,
            resend_after_s=self.settings.resend_after_s,
            overdue_after_s=self.settings.overdue_after_s,
            keeps_encoded=self.settings.link.through_codec,
            validate=self.settings.validate,
        )
        observer = _Observer(self, name, epoch, self._digest, self._event_watchers)
        observer.process = process = Process(name, epoch, self, self._casting, settings, observer)
        process.turn_s = self.settings.turn_s
        return process

    def hear(self, process: Process, what: list[Envelope] | ReplaceActor | FailRun) -> None:
        """Something has reached the supervisor."""
        if self.supervisor.is_given_up(process):
            return
        if isinstance(what, list):
            for _, event in what:
                for watcher in self._watchers:
                    watcher.heard(process, event)
                self._on_heard(event)
        elif isinstance(what, ReplaceActor):
            target = self.supervisor.processes.get(what.name)
            if target is not None and target.epoch == what.epoch:
                self.supervisor.give_up(target, what.cause)
        else:
            self._fail_run(what.story)

    def _on_heard(self, event: Event) -> None:
        match event:
            case RunFinished():
                self._end(event.completed, event.story, event)
            case EnginesWanted():
                self.supervisor.want_engines(event.engines, event.given_up)
            case EngineEmptied():
                self.supervisor.emptied(event.engine, event.engine_epoch)
            case _:
                pass  # for watchers
        if self._scaling is not None:
            self._scaling.heard(event, self.supervisor.done_without)

    def _on_lost(self, name: str, cause: str) -> None:
        for watcher in self._watchers:
            watcher.lost(name, cause)

    def _fail_run(self, story: str) -> None:
        self._end(False, story, None)

    def _end(self, completed: bool, story: str, finished: RunFinished | None) -> None:
        if self.ending is None:
            self.ending = Ending(at_s=self.clock.now_s, completed=completed, story=story, finished=finished)
            self.clock.stop()


def _hear(host: VirtualHost, what: tuple[Process, list[Envelope] | ReplaceActor | FailRun]) -> None:
    host.hear(*what)


def _line(process: Process) -> str:
    machine, delivery = process.shell.machine, process.shell.delivery
    parts = [f"{process.name} (epoch {process.epoch}, {process.status.name.lower()}): {machine.state}"]
    leases = machine.leases()
    if leases:
        parts.append("works on " + ", ".join(f"{lease.key} ({lease.stage.value})" for lease in leases[:8]))
    kept = [f"{lease.key}" for lease in itertools.islice(delivery.leases(), 8)]
    if kept:
        parts.append(f"keeps {', '.join(kept)} until settled")
    absent = [name for name in process.peers if process.peers[name].status is not Status.RUNNING]
    if absent:
        parts.append(f"hears nothing of {', '.join(absent)}")
    return "; ".join(parts)


class _Observer:
    """Hands what one shell does to the log and to the watchers."""

    __slots__ = ("_clock", "_digest", "_epoch", "_host", "_name", "_watchers", "process")

    def __init__(
        self, host: VirtualHost, name: str, epoch: int, digest: EventDigest | None, watchers: list[Watcher]
    ) -> None:
        self.process: Process | None = None
        self._host = host
        self._name, self._epoch = name, epoch
        self._clock = host.clock
        self._digest = digest
        self._watchers = watchers

    def handled(self, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.shell.shell.Observer`."""
        self._host.num_events += 1
        if self._digest is not None:
            self._digest.add(self._clock.now_s, self._name, self._epoch, header, event)
        if self._watchers:
            assert self.process is not None
            for watcher in self._watchers:
                watcher.handled(self.process, event, header, commands)

    def failed(self, event: Event, header: Header | None, error: Exception) -> None:
        """The error ends the run, and tells by itself."""
