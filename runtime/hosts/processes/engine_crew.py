"""Engines that join and leave a run of processes: who is started, who is told to leave, who goes.

Invariants:

* A process that is to leave is told so by the directory, as everyone is; one that has not started is not asked.
* One that says that its machine is taken is told to leave, and another takes its place when the notice has run out.
* Under ``engines.scale: by_bound`` the Buffer is asked for other engines as an operator would ask it.
* Who goes is given up as one that is lost, and followed only if it is wanted again.
* What an engine has left to a successor is ended when it goes for good, and its GPUs are given back: by the launcher,
  on whatever machine.
* An engine is started when what it takes of a machine is reserved for it (``gpu_waits.py``).
* The Buffer is told of one that was lost too often until it has recorded that the run goes on without it.

| waits for | who ends it |
|---|---|
| a leaver to be empty | PromptSource; else ``engines.leave_timeout_s``, or the notice that it gave |
| the GPUs of an engine that joins or comes back | the launcher; else ``engines.gpu_timeout_s`` |
| the Buffer to record that an engine is given up | the Buffer, or its successor; else the end of the run |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.messages.membership import EngineEmptied, EnginesWanted
from penstock.messages.names import SUPERVISOR, is_engine
from penstock.messages.training import StepReported
from penstock.runtime.hosts.processes.control import MachineNoticed
from penstock.runtime.hosts.processes.gpu_waits import GpuWaits
from penstock.runtime.shell.engine_membership import EngineMembership
from penstock.runtime.shell.engine_scaling import EngineScaler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.messages.membership import EngineGivenUp, EngineNoticed
    from penstock.messages.operator import EnginesAsked
    from penstock.messages.training import ActorReported
    from penstock.runtime.hosts.processes.control import DirectoryChanged
    from penstock.runtime.hosts.processes.directory import Directory
    from penstock.runtime.hosts.processes.incarnations import Incarnation
    from penstock.runtime.hosts.processes.ports import Launcher, RunSink, SupervisorSettings


TELL_AGAIN_S: Final = 1.0


class EngineCrew:
    """The engines, for the supervisor."""

    def __init__(
        self,
        settings: SupervisorSettings,
        directory: Directory,
        crew: Mapping[str, Incarnation],
        due: dict[str, tuple[float, int]],
        *,
        start: Callable[[str, int], None],
        end: Callable[[Incarnation, float, Callable[[float], None]], None],
        part_from: Callable[[Incarnation], None],
        launcher: Launcher,
        broadcast: Callable[[DirectoryChanged], None],
        ask: Callable[[EnginesAsked | EngineGivenUp | EngineNoticed], None],
        forget: Callable[[str], None],
        fail: Callable[[str], None],
        sink: RunSink,
    ) -> None:
        """
        Args:
            settings: of the run.
            directory: who can be reached, and who is given up.
            crew: every incarnation that is there, by name.
            due: restarts by name: when, and as which epoch.
            start: starts an incarnation of this name and epoch.
            end: has an incarnation end, where that has to be waited for, and goes on then.
            part_from: gives an incarnation up, before everyone.
            launcher: reserves what engines take, and ends what they have left to a successor.
            broadcast: tells everyone.
            ask: says to the Buffer which engines there are to be, or are not, and what is to be written down.
            forget: has the restarts of this name count no more.
            fail: ends the run with this story.
            sink: is told what happens.
        """
        self._settings, self._directory, self._crew, self._due = settings, directory, crew, due
        self._start, self._end, self._part_from, self._end_left = start, end, part_from, launcher.end_left
        self._broadcast, self._sink = broadcast, sink
        self.membership = EngineMembership(settings.leave_timeout_s, settings.fewest_engines)
        self._ask, self._scaler = ask, None if settings.scaling is None else EngineScaler(settings.scaling)
        self._forget, self._fail = forget, fail
        self._tell_at_s = 0.0
        self._waits = GpuWaits(
            launcher, settings.gpu_timeout_s, start=start, give_up=self._waited_in_vain, note=ask, sink=sink
        )

    def start(self, name: str, epoch: int, now_s: float) -> None:
        """Start an incarnation of whomever: of an engine as soon as there is what it takes."""
        if is_engine(name):
            self._waits.start(name, epoch, now_s)
        else:
            self._start(name, epoch)

    def reported(self, report: ActorReported | StepReported) -> None:
        """An actor says what it did, or that a step is trained; other engines may have to be there for it."""
        if self._scaler is None:
            return
        if isinstance(report, StepReported):
            self._scaler.step()
        elif (order := self._scaler.hear(report)) is not None:
            self._ask(order)

    def hear(self, event: EnginesWanted | EngineEmptied | MachineNoticed, sender: Incarnation, now_s: float) -> None:
        """The Buffer says which engines the run is to have, PromptSource that a leaver is empty, or an engine that its
        machine is taken."""
        match event:
            case EnginesWanted():
                for name in self.membership.want(event.engines, event.given_up):
                    self._forget(name)  # who asks for it again has seen to it
                if self._scaler is not None:
                    self._scaler.engines_are(event.engines, but=self.membership.done_without)
                if story := self.membership.shortage():
                    self._fail(story)
                else:
                    self.match(now_s)
            case EngineEmptied():
                self._emptied(event, now_s)
            case MachineNoticed():
                self._noticed(event, sender, now_s)

    def _noticed(self, event: MachineNoticed, incarnation: Incarnation, now_s: float) -> None:
        name = incarnation.name
        if self.membership.is_taken(name):
            return  # it says so until it has heard that it is to leave
        if self.membership.noticed(name, now_s, event.notice_s):
            self._broadcast(self._directory.leave(name, incarnation.epoch))
        self._sink.on_notice(
            SUPERVISOR,
            f"the machine of {name} is taken in {event.notice_s:.1f} s, as {event.how} says: it hands back what it "
            "has, and another takes its place then",
        )

    def match(self, now_s: float) -> None:
        """Start those that are wanted and not there, and have those leave that are not wanted."""
        for name in [name for name in self._due if not self.membership.is_wanted(name)]:
            self._never_started(name, self._due.pop(name)[1])  # what its predecessor has left waits for a successor
        for name, at_s in self.membership.returns():
            self._due[name] = (at_s, self._directory.next_epoch(name, self._settings.first_epoch))
        for name in self._waits.names:
            if not self.membership.is_wanted(name):
                self._never_started(name, self._waits.drop(name))
                self._sink.on_notice(SUPERVISOR, f"{name} is not waited for any more")
        present = {name for name in self._crew if is_engine(name)}
        for name in self.membership.missing(present | self._due.keys() | self._waits.names):
            self._waits.start(name, self._directory.next_epoch(name, self._settings.first_epoch), now_s)
        for name in self.membership.surplus(present):
            self.membership.leaves(name, now_s)
            if self._crew[name].process is None:
                self._leave(self._crew[name], "before it had started", now_s)
            else:
                self._broadcast(self._directory.leave(name, self._crew[name].epoch))

    def _emptied(self, event: EngineEmptied, now_s: float) -> None:
        """Nothing is left with this incarnation."""
        incarnation = self._crew.get(event.engine)
        is_meant = incarnation is not None and incarnation.epoch == event.engine_epoch
        if incarnation is not None and is_meant and self.membership.is_leaving(event.engine):
            self._leave(incarnation, "with nothing left to do", now_s)

    def gives_up(self, name: str, epoch: int, story: str, now_s: float) -> bool:
        """This engine, which was just lost, is not started again; False if the run cannot do without it."""
        if not self.membership.give_up(name, epoch, story):
            return False
        self.has_gone(name, epoch)
        self._sink.on_notice(SUPERVISOR, f"the run goes on without {name}: {story}", is_warning=True)
        self._tell_at_s = now_s
        return True

    def _waited_in_vain(self, name: str, epoch: int, story: str, now_s: float) -> None:
        """Its GPUs have not come in time."""
        self._broadcast(self._directory.give_up(name, epoch))  # word on each incarnation is heard once
        if not self.gives_up(name, epoch, story, now_s):
            self._fail(f"{name}: {story}")

    def _never_started(self, name: str, epoch: int) -> None:
        self._broadcast(self._directory.give_up(name, epoch))
        self.has_gone(name, epoch)

    def has_gone(self, name: str, epoch: int) -> None:
        """This incarnation, which was just killed, is followed by none."""
        self._sink.on_actor(name, epoch, "left")
        self._end_left(name)

    def look(self, now_s: float) -> None:
        """Start those whose GPUs have come, take those whose time is up, tell the Buffer of those that are given up."""
        self._waits.look(now_s)
        if now_s >= self._tell_at_s:
            self._tell_at_s = now_s + TELL_AGAIN_S
            for given_up in self.membership.unrecorded():
                self._ask(given_up)
        for name in self.membership.late(now_s):
            how = "not empty yet when its machine is taken"
            if not self.membership.is_taken(name):
                how = f"after engines.leave_timeout_s = {self._settings.leave_timeout_s:g}, not empty yet"
            self._leave(self._crew[name], how, now_s)

    def _leave(self, incarnation: Incarnation, how: str, now_s: float) -> None:
        self._end(incarnation, now_s, partial(self._has_left, incarnation, how))

    def _has_left(self, incarnation: Incarnation, how: str, now_s: float) -> None:
        self._part_from(incarnation)
        self.has_gone(incarnation.name, incarnation.epoch)
        self._sink.on_notice(SUPERVISOR, f"{incarnation.name} has left, {how}")
        self.match(now_s)
