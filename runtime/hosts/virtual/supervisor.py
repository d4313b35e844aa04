"""The supervisor on the virtual host: who is alive, who is given up, who takes whose place.

Invariants:

* An incarnation that was given up never speaks for its actor again: it is announced as lost, with its epoch, before
  its successor starts, and the successor has the next epoch.
* Of one that shares devices this is said when nothing of it is left, as its memory is taken for free then.
* A process learns of the others from here alone: from the directory that it is started with, and from announcements,
  which reach it in order.
* How soon and how often a process is replaced is decided as on real machines
  (:mod:`penstock.runtime.shell.restarts`), and which engines the run can do without
  (:mod:`penstock.runtime.shell.engine_membership`).
* After the loss of the machine everything starts anew, with epochs above all that were; nothing of before is heard.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.messages.ledger import EPOCHS_PER_DRIVE
from penstock.messages.names import is_engine
from penstock.runtime.hosts.virtual.process import Process, Status
from penstock.runtime.shell.engine_membership import EngineMembership
from penstock.runtime.shell.restarts import Restarts, patience_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.messages.membership import ActorEpoch, EngineGivenUp
    from penstock.runtime.hosts.virtual.clock import VirtualClock

TELL_AGAIN_S: Final = 1.0
END_AGAIN_S: Final = 1.0


class SupervisionModel(msgspec.Struct, frozen=True, kw_only=True):
    """How quick the supervisor is, and what it allows."""

    heartbeat_timeout_s: float = 10.0
    """A process that was not heard for so long is given up; one whose start took long, after :func:`.patience_s`."""
    max_restarts: int = 10
    """Restarts of one actor within ten minutes, after which the run fails."""
    start_s: float = 0.5
    """Longest time that a process takes to start; each draws its own."""
    notice_s: float = 0.01
    """Longest time until the end of a process is noticed; each draws its own."""
    leave_timeout_s: float = 30.0
    """An engine that is to leave is taken after so long, if it is not empty before."""
    fewest_engines: int | None = None
    """That are left when others are lost for good; None: all have to be there from the start to the end."""
    announce_s: float = 0.005
    """Longest time until an announcement reaches a process; each draws its own."""
    shares_devices: frozenset[str] = frozenset()
    """Actors on devices that others take in turns with them."""
    end_s: float = 0.0
    """Longest time from the end of such an actor's process to that of all that it has started; each draws its own."""
    end_timeout_s: float = 70.0
    """One that cannot be ended for so long ends the run."""


class Supervisor:
    """Starts, watches and replaces processes."""

    def __init__(
        self,
        model: SupervisionModel,
        clock: VirtualClock,
        *,
        seed: int,
        spawn: Callable[[str, int], Process],
        fail_run: Callable[[str], None],
        on_lost: Callable[[str, str], None],
        tell: Callable[[EngineGivenUp], None],
    ) -> None:
        self.model = model
        self.processes: dict[str, Process] = {}
        """The present incarnation of each actor, up or being started."""
        self._restarts = Restarts(max_restarts=model.max_restarts)
        self._clock = clock
        self._random = random.Random(seed)
        self._random_ends = random.Random(f"ends {seed}")
        self._ending: set[Process] = set()
        """Given up as soon as nothing of them is left."""
        self._spawn = spawn
        self._fail_run = fail_run
        self._on_lost = on_lost
        self._tell = tell
        self._drive = 0
        self._engines = EngineMembership(model.leave_timeout_s, model.fewest_engines)
        self._coming: dict[str, int] = {}
        """Epoch of those that are about to start."""
        self._singles: dict[str, Process] = {}
        """Those of ``processes`` that are no engines."""
        self._members: dict[str, int] = {}
        self._fences: dict[str, int] = {}
        """Highest epoch that was given up, by name."""

    # --- start and directory ----------------------------------------------------------------------------------

    def start(self, name: str, epoch: int = 0) -> None:
        """Start an incarnation; it is announced when it is up."""
        at_s = self._clock.now_s + self._random.random() * self.model.start_s
        self._coming[name] = epoch
        self._clock.at(at_s, _start, self, (name, epoch, self._drive))

    def start_now(self, name: str, epoch: int) -> None:
        """The process is up: hand it the directory, and announce it to the others."""
        if not self.is_coming(name, epoch):
            return
        del self._coming[name]
        if not self._engines.is_wanted(name):
            return
        process = self.processes[name] = self._spawn(name, epoch)
        if not is_engine(name):
            self._singles[name] = process
        self._members[name] = epoch
        process.start(self._introduce)
        if process.status is not Status.DEAD:
            self._announce(name, epoch, process)

    def adopt(self, processes: Iterable[Process], given_up: Mapping[str, int]) -> None:
        """These run already. Each is told where the others are, and so says again what it keeps for them.

        Args:
            processes: that stand in for recorded ones.
            given_up: epochs of actors that were lost and have not come back; their successors are started.
        """
        self._fences.update(given_up)
        for process in processes:
            name, epoch = process.name, process.epoch
            self.processes[name] = process
            if not is_engine(name):
                self._singles[name] = process
            self._members[name] = epoch
            self._fences[name] = epoch - 1
        for process in self.processes.values():
            self._introduce(process)
        for name, epoch in given_up.items():
            self.start(name, epoch + 1)

    def _introduce(self, process: Process) -> None:
        for name, epoch in self._fences.items():
            process.shell.on_lost(name, epoch)
        for peer in self._those_concerned_by(process.name):
            if peer.name in self._members:
                process.peers[peer.name] = peer
                process.shell.on_returned(peer.name, peer.epoch)
                if self._engines.is_leaving(peer.name):
                    process.shell.on_leaving(peer.name, peer.epoch)

    def _announce(self, name: str, epoch: int, process: Process | None) -> None:
        """Tell everyone that an incarnation is there (``process``) or given up (None)."""
        for listener in self._those_concerned_by(name):
            self._inform(listener, _hear, (name, epoch, process))

    def _inform(self, listener: Process, hear: Callable[[Process, Any], None], what: object) -> None:
        """In the order in which things happen."""
        if listener.status is Status.DEAD or self.is_given_up(listener):
            return
        at_s = self._clock.now_s + self._random.random() * self.model.announce_s
        at_s = listener.informed_s = max(at_s, listener.informed_s)
        self._clock.at(at_s, hear, listener, what)

    def _those_concerned_by(self, name: str) -> list[Process]:
        """Who ever speaks with this actor: engines do not among each other, and there may be thousands of them."""
        others = self.processes if not is_engine(name) else self._singles
        return [process for process in others.values() if process.name != name]

    # --- loss -------------------------------------------------------------------------------------------------

    def died(self, process: Process) -> None:
        """A process has ended; the supervisor notices soon. What it had started may hold devices a little longer."""
        if process.name in self.model.shares_devices:
            process.released_s = self._clock.now_s + self._random_ends.random() * self.model.end_s
        at_s = self._clock.now_s + self._random.random() * self.model.notice_s
        self._clock.at(at_s, _notice, self, (process, "ended"))

    def stopped(self, process: Process) -> None:
        """A process has fallen silent; if it still is after the heartbeat limit, it is given up."""
        at_s = self._clock.now_s + patience_s(self.model.heartbeat_timeout_s, process.start_s)
        self._clock.at(at_s, _check_silence, self, (process, process.num_stops))

    def is_given_up(self, process: Process) -> bool:
        """Whether nothing that this process still says counts."""
        return process.epoch < self.first_epoch or process.epoch <= self._fences.get(process.name, -1)

    def give_up(self, process: Process, cause: str) -> None:
        """Fence this incarnation, kill it, and start its successor; nothing for one that was given up before."""
        if self.processes.get(process.name) is process and not self.is_given_up(process):
            self._end(process, partial(self._follow, process, cause))

    def _end(self, process: Process, then: Callable[[], None]) -> None:
        """Go on ``then``: where it shares devices, when nothing of it is left; as was said first."""
        if process.name not in self.model.shares_devices:
            then()
        elif process not in self._ending:
            self._ending.add(process)
            self.await_end(process, then, self._clock.now_s + self.model.end_timeout_s)

    def await_end(self, process: Process, then: Callable[[], None], deadline_s: float) -> None:
        """Kill it as soon as it can be, and look again until all has ended."""
        now_s = self._clock.now_s
        if process not in self._ending:
            return  # the machine was lost meanwhile
        if process.status is not Status.STOPPED or not process.survives_sigkill:
            process.kill()
        if process.status is Status.DEAD and now_s >= process.released_s:
            self._ending.remove(process)
            then()
        elif now_s >= deadline_s:
            self._fail_run(f"{process.name} could not be ended within {self.model.end_timeout_s:g} s")
        else:
            at_s = process.released_s if process.status is Status.DEAD else now_s + END_AGAIN_S
            self._clock.at(at_s, _await_end, self, (process, then, deadline_s))

    def _follow(self, process: Process, cause: str) -> None:
        name, epoch = process.name, process.epoch
        is_replaced = self._engines.is_replaced(name)
        self._part_from(process)
        if not is_replaced:
            self._has_left(process)
            return
        pause_s = self._restarts.pause_s(name, self._clock.now_s)
        if pause_s is None:
            self._do_without(process, cause)
            return
        self._on_lost(name, cause)
        self._coming[name] = epoch + 1
        self._clock.at(self._clock.now_s + pause_s, _restart, self, (name, epoch + 1, self._drive))

    def _do_without(self, process: Process, cause: str) -> None:
        """It was lost too often."""
        name, story = process.name, self._restarts.limit_story(process.name, cause)
        if not self._engines.give_up(name, process.epoch, story):
            self._fail_run(story)
            return
        self._on_lost(name, cause)
        self._has_left(process)
        if len(self._engines.unrecorded()) == 1:  # else the Buffer is being told already
            self.tell_given_up(self._drive)

    def tell_given_up(self, drive: int) -> None:
        """Of those that are given up, until the Buffer has recorded it."""
        if drive != self._drive:
            return
        unrecorded = self._engines.unrecorded()
        for event in unrecorded:
            self._tell(event)
        if unrecorded:
            self._clock.at(self._clock.now_s + TELL_AGAIN_S, Supervisor.tell_given_up, self, drive)

    @property
    def done_without(self) -> frozenset[str]:
        """Engines that were given up, as is recorded, and that nobody has asked for since."""
        return self._engines.done_without

    def _part_from(self, process: Process) -> None:
        """It counts no more, everyone hears so, and it is killed."""
        name, epoch = process.name, process.epoch
        self._engines.gone(name)
        self._fences[name] = epoch
        self._members.pop(name, None)
        if not process.survives_sigkill:
            process.kill()
        self._announce(name, epoch, None)

    # --- engines that join and leave --------------------------------------------------------------------------

    def want_engines(self, engines: Iterable[str], given_up: Iterable[ActorEpoch] = ()) -> None:
        """The run is to have these, and has recorded that those were given up."""
        for name in self._engines.want(engines, given_up):
            self._restarts.forget(name)  # who asks for it again has seen to it
        if story := self._engines.shortage():
            self._fail_run(story)
            return
        self._match_engines()

    def emptied(self, name: str, epoch: int) -> None:
        """Nothing is left with this incarnation, which is to leave."""
        process = self.processes.get(name)
        if process is not None and process.epoch == epoch and self._engines.is_leaving(name):
            self._leave(process)

    def _leave(self, process: Process) -> None:
        def leave() -> None:
            self._part_from(process)
            self._has_left(process)

        self._end(process, leave)

    def _has_left(self, process: Process) -> None:
        del self.processes[process.name]
        self._match_engines()

    def noticed(self, process: Process, notice_s: float) -> None:
        """The machine of this engine is taken after so long, whether it has left by then or not."""
        name = process.name
        if self.processes.get(name) is not process or self.is_given_up(process):
            return
        if self._engines.noticed(name, self._clock.now_s, notice_s):
            self._tell_to_leave(process)
        self._clock.at(self._clock.now_s + notice_s, _take_machine, self, process)

    def _tell_to_leave(self, process: Process) -> None:
        for listener in (*self._those_concerned_by(process.name), process):
            self._inform(listener, _hear_leaving, (process.name, process.epoch))

    def _match_engines(self) -> None:
        for name, at_s in self._engines.returns():
            epoch = self._coming[name] = max(self._fences.get(name, -1) + 1, self.first_epoch)
            self._clock.at(max(at_s, self._clock.now_s), _restart, self, (name, epoch, self._drive))
        present = {name for name in self._members if is_engine(name)}
        for name in self._engines.missing(present | self._coming.keys()):
            self.start(name, max(self._fences.get(name, -1) + 1, self.first_epoch))
        for name in self._engines.surplus(present):
            process = self.processes[name]
            self._engines.leaves(name, self._clock.now_s)
            self._tell_to_leave(process)
            self._clock.at(self._clock.now_s + self.model.leave_timeout_s, _leave, self, process)

    def time_is_up(self, process: Process) -> None:
        """Of a leaver, if it is still there."""
        if self._members.get(process.name) == process.epoch and self._engines.is_leaving(process.name):
            self._leave(process)

    def forget_all(self) -> list[str]:
        """Every process is gone, and so is the memory of who is given up; the names of those that were there."""
        gone = [name for name, process in self.processes.items() if process.status is not Status.DEAD]
        dead = list(self.processes.values())
        for name in (*self.processes, *self._coming):
            self._restarts.forget(name)  # the next driver knows of none
        for table in (self.processes, self._singles, self._members, self._fences, self._coming):
            table.clear()
        self._engines = EngineMembership(self.model.leave_timeout_s, self.model.fewest_engines)
        self._ending.clear()
        self._drive += 1
        for process in dead:
            process.kill()
            process.released_s = self._clock.now_s
        return gone

    @property
    def first_epoch(self) -> int:
        """With which everyone starts: above all epochs before the machine was lost."""
        return self._drive * EPOCHS_PER_DRIVE

    def is_current(self, drive: int) -> bool:
        """Whether the machine has not been lost since this drive began."""
        return drive == self._drive

    def is_coming(self, name: str, epoch: int) -> bool:
        """Whether this incarnation is about to start."""
        return self._coming.get(name) == epoch

    def is_due(self, name: str) -> bool:
        """Whether an incarnation of this name is about to start."""
        return name in self._coming

    @property
    def num_restarts(self) -> int:
        """Of all actors since the start of the run."""
        return sum(self._restarts.totals.values())


def _start(supervisor: Supervisor, what: tuple[str, int, int]) -> None:
    name, epoch, drive = what
    if supervisor.is_current(drive):
        supervisor.start_now(name, epoch)


def _restart(supervisor: Supervisor, what: tuple[str, int, int]) -> None:
    name, epoch, drive = what
    if supervisor.is_current(drive) and supervisor.is_coming(name, epoch):
        supervisor.start(name, epoch)


def _notice(supervisor: Supervisor, what: tuple[Process, str]) -> None:
    supervisor.give_up(*what)


def _check_silence(supervisor: Supervisor, what: tuple[Process, int]) -> None:
    process, num_stops = what
    if process.status is Status.STOPPED and process.num_stops == num_stops:
        supervisor.give_up(process, "silent beyond the heartbeat limit")


def _await_end(supervisor: Supervisor, what: tuple[Process, Callable[[], None], float]) -> None:
    supervisor.await_end(*what)


def _leave(supervisor: Supervisor, process: Process) -> None:
    supervisor.time_is_up(process)


def _take_machine(supervisor: Supervisor, process: Process) -> None:
    if process.status is not Status.DEAD:
        process.survives_sigkill = False
        process.kill()
    supervisor.time_is_up(process)


def _hear_leaving(process: Process, what: tuple[str, int]) -> None:
    """The announcement that an engine is to leave arrives."""
    if process.is_up(_hear_leaving, what):
        process.shell.on_leaving(*what)
        process.finish_turn()


def _hear(process: Process, what: tuple[str, int, Process | None]) -> None:
    """An announcement arrives."""
    if not process.is_up(_hear, what):
        return
    name, epoch, peer = what
    if peer is None:
        known = process.peers.get(name)
        if known is not None and known.epoch <= epoch:
            del process.peers[name]
        process.shell.on_lost(name, epoch)
    else:
        process.peers[name] = peer
        process.shell.on_returned(name, epoch)
    process.finish_turn()
