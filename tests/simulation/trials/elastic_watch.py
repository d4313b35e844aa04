"""Watches engines that join and leave, with books of its own.

Invariants:

* The engines that are there, or about to be, are those that the ledger names, but for leavers whose time is not up.
* An engine is lost no more often than a run allows of one actor and once more, unless the ledger has named others
  meanwhile. Whoever is given up then is not started again until that is recorded, and it is given up only while enough
  are left.
* PromptSource sends nothing to an engine that it knows to leave, nor to one that came when others served already, or
  whose lent device was taken back, and has not said since that it serves something.
* What a leaver has handed back goes on from every token that it had made, where no message is lost.
* A leaver goes early only when whatever it had finished has reached the Scorer.
* A newcomer is given only weights that another engine has passed with, while there is one and there are such.
* A version that every engine serves, newcomers aside that serve nothing yet, is announced.
* A sample has lost no more engines than have died: one that leaves is no loss, where word of that came first.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.phases import Phase as RunPhase
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.phases import Phase
from penstock.messages.commands import Send
from penstock.messages.flow import GenerationClosed, SampleGenerated, SampleIssued
from penstock.messages.ledger import EnginesRecorded
from penstock.messages.local import GenerationEnded
from penstock.messages.membership import EngineEmptied, EngineJoined, EngineLeaving, EngineLost
from penstock.messages.names import BUFFER, SCORER, is_engine
from penstock.messages.samples import Cancelled
from penstock.messages.weights import EngineReady, WeightsCommitted
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.process import Status
from penstock.runtime.shell.restarts import WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import SampleKey
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.host import VirtualHost
    from penstock.runtime.hosts.virtual.process import Process

LATE_S: Final = 60.0
"""Seconds after the end of a leaver's time until which it must be gone: word of what is recorded has to reach the
supervisor, from a Buffer that may die meanwhile."""


class ElasticWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self, host: VirtualHost, *, salvages: bool, loses_nothing: bool) -> None:
        self._host = host
        self._keeps_tokens = salvages and loses_nothing
        self.num_joined = self.num_left_early = self.num_handed_back = self.num_given_up = 0
        self._engines: tuple[str, ...] = ()
        self._recorded: EnginesRecorded | None = None
        self._losses: dict[str, list[float]] = {}
        """When an engine was lost since it last was none of the run's."""
        self._given_up: set[str] = set()
        """Those that were lost for the last time that is allowed, and of which that is not recorded yet."""
        self._num_lost: Counter[Process] = Counter()
        """By incarnation of PromptSource: engines that it has heard were lost, and not before that they leave."""
        self._newcomers: dict[Process, set[str]] = {}
        """By incarnation of PromptSource: who came late and serves nothing yet; of WeightPublisher: who came late."""
        self._turns: dict[tuple[Process, str, int], int] = {}
        """By incarnation of PromptSource and of an engine that is lent its devices: the last turn that was heard of."""
        self._leavers: dict[Process, set[str]] = {}
        """By incarnation of PromptSource: those that it has heard of."""
        self._served: dict[Process, set[str]] = {}
        self._made: dict[tuple[str, SampleKey, int], int] = {}
        """Tokens that there were of attempts that were broken off."""
        self._handed_back: dict[tuple[Process, SampleKey], tuple[int, int]] = {}
        """By incarnation of PromptSource: attempt, and tokens that there were."""
        self._finished: dict[str, set[SampleKey]] = {}
        """By engine and incarnation: what it has sent to the Scorer."""
        self._heard: set[SampleKey] = set()
        """What some Scorer has taken."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        machine, supervisor = process.shell.machine, self._host.supervisor
        for name in self._given_up:
            is_there = name in supervisor.processes or supervisor.is_due(name)
            assert not is_there, f"{name} is given up, and not recorded to be asked for again, and is started"
        if isinstance(machine, PromptSource):
            self._at_prompt_source(process, machine, event, header, commands)
        elif isinstance(machine, WeightPublisher):
            self._at_publisher(process, machine, event, commands)
        elif isinstance(machine, EngineWorker):
            if (
                isinstance(event, GenerationEnded)
                and isinstance(event.outcome, Cancelled)
                and machine.phase != "spoilt"
            ):
                self._made[_life(process), event.key, event.attempt] = event.part.num_tokens
            for command in commands:
                if isinstance(command, Send) and isinstance(command.event, SampleGenerated):
                    self._finished.setdefault(_life(process), set()).add(command.event.sample.key)
        elif process.name == SCORER and isinstance(event, SampleGenerated):
            self._heard.add(event.sample.key)

    def _at_prompt_source(
        self,
        process: Process,
        machine: PromptSource,
        event: Event,
        header: Header | None,
        commands: list[AnyCommand],
    ) -> None:
        served = self._served.setdefault(process, set())
        newcomers, leavers = self._newcomers.setdefault(process, set()), self._leavers.setdefault(process, set())
        match event:
            case EngineJoined():
                for names in (served, newcomers):
                    names.discard(event.name)
                if served - {event.name}:
                    newcomers.add(event.name)
            case EngineLost():
                self._num_lost[process] += event.name not in leavers
                for names in (served, newcomers, leavers):
                    names.discard(event.name)
            case EngineReady():
                self._at_ready(process, machine, event)
            case GenerationClosed(outcome=Cancelled()):
                self.num_handed_back += 1
                assert header is not None
                made = self._made.get((f"{header.sender} {header.epoch}", event.key, event.attempt), 0)
                self._handed_back[process, event.key] = (event.attempt, max(event.num_tokens, made))
            case EngineLeaving():
                leavers.add(event.name)
            case _:
                pass
        for command in commands:
            if isinstance(command, Send) and isinstance(command.event, SampleIssued):
                issued, name = command.event, command.to
                assert name not in leavers, f"{issued.key} is issued to {name}, which is to leave"
                assert name not in newcomers, f"{issued.key} is issued to {name}, which has come and serves nothing yet"
                self._assert_goes_on(process, issued)
        for _, lease in machine.table.all_leases():
            assert lease.num_engine_losses <= self._num_lost[process], (
                f"{lease.key} is said to have lost engines that only left"
            )

    def _at_ready(self, process: Process, machine: PromptSource, event: EngineReady) -> None:
        view = machine.table.router.engines.get(event.engine)
        if view is None or view.epoch != event.engine_epoch or event.engine in self._leavers[process]:
            return  # of what leaves nobody expects anything, so it does not make those newcomers who come now
        served, newcomers = self._served[process], self._newcomers[process]
        served.discard(event.engine)
        life = process, event.engine, event.engine_epoch
        if event.turn > self._turns.get(life, 0):  # its lent device was taken back
            newcomers.add(event.engine)
            self._turns[life] = event.turn
        if event.version >= 0:
            served.add(event.engine)
            newcomers.discard(event.engine)

    def _assert_goes_on(self, process: Process, issued: SampleIssued) -> None:
        # The next issue goes on; or a PromptSource that had not known the sample begins again, with the same attempts.
        attempt, num_tokens = self._handed_back.pop((process, issued.key), (-1, 0))
        if not self._keeps_tokens or issued.attempt != attempt + 1:
            return
        num_known = 0 if issued.prefix is None else issued.prefix.num_tokens
        assert num_known >= num_tokens, f"{issued.key} goes on from {num_known} tokens, its engine had {num_tokens}"

    def _at_publisher(
        self, process: Process, machine: WeightPublisher, event: Event, commands: list[AnyCommand]
    ) -> None:
        late = self._newcomers.setdefault(process, set())
        if isinstance(event, EngineJoined) and machine.announced >= 0:
            late.add(event.name)
        elif isinstance(event, EngineLost | EngineLeaving):
            late.discard(event.name)
        elif isinstance(event, EngineReady) and event.turn:  # lent its devices: it begins again without weights
            late.add(event.engine)
        engines = machine.engines.by_name
        # One that served and was found wrong serves nothing again.
        newcomers = {name for name in late if name not in engines or engines[name].version < 0}
        counted = [
            engine.version
            for name, engine in engines.items()
            if name not in newcomers and engine.phase not in (Phase.STARTING, Phase.QUARANTINED)
        ]
        has_choice = bool(counted) and machine.exports.best() is not None
        for command in commands:
            match command:
                case Send(to=name, event=WeightsCommitted(publish=publish)) if name in newcomers and has_choice:
                    assert machine.exports.has_passed(publish), f"{name} has come and goes first with publish {publish}"
                case _:
                    pass
        if machine.announced >= 0 and counted:
            assert machine.announced >= min(counted), f"version {min(counted)} is served and not announced"

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        for entry in entries:
            if isinstance(entry, EnginesRecorded):
                assert entry.engines != self._engines, "engines are recorded that are those of the run already"
                self.num_joined += bool(self._engines) and len(set(entry.engines) - set(self._engines))
                fewest = self._host.supervisor.model.fewest_engines
                assert fewest is None or len(entry.engines) >= fewest, f"{entry}: fewer than {fewest}"
                self.num_given_up += "was lost" in entry.reason
                self._losses = {name: at_s for name, at_s in self._losses.items() if name in entry.engines}
                self._given_up &= set(entry.engines)
                self._recorded, self._engines = entry, entry.engines
                self._look_later(entry, process.epoch)

    def _look_later(self, entry: EnginesRecorded, buffer_epoch: int) -> None:
        late_s = self._host.supervisor.model.leave_timeout_s + LATE_S
        self._host.clock.at(self._host.clock.now_s + late_s, ElasticWatch._look, self, (entry, buffer_epoch))

    def _look(self, what: tuple[EnginesRecorded, int]) -> None:
        entry, buffer_epoch = what
        if entry.engines != self._engines or self._host.ending is not None:
            return
        buffer = self._host.supervisor.processes.get(BUFFER)
        if buffer is None or buffer.epoch != buffer_epoch:  # it was replaced, and tells the supervisor anew
            self._look_later(entry, buffer_epoch if buffer is None else buffer.epoch)
            return
        for name, process in self._host.supervisor.processes.items():
            stays = is_engine(name) and name not in entry.engines and process.status is not Status.DEAD
            assert not stays or process.survives_sigkill, f"{name} is there, and the engines are {entry.engines}"
        for name in entry.engines:
            is_there = name in self._host.supervisor.processes or self._host.supervisor.is_due(name)
            machine = buffer.shell.machine
            assert isinstance(machine, Buffer)
            # A run that ends changes its engines no more, and does without those that are given up then.
            assert is_there or machine.run.phase not in (RunPhase.FILLING, RunPhase.RUNNING), (
                f"{name} is not there, and the engines are {entry.engines}"
            )

    def heard(self, process: Process, event: Event) -> None:
        if not isinstance(event, EngineEmptied):
            return
        leaver = self._host.supervisor.processes.get(event.engine)
        if leaver is None or leaver.epoch != event.engine_epoch or leaver.status is Status.DEAD:
            return
        self.num_left_early += 1
        lost = self._finished.get(_life(leaver), set()) - self._heard
        kept = {key for key in lost if key.group_id not in leaver.shell.delivery.settled}
        assert not kept, f"{event.engine} is let go, and nobody else has {kept}"

    def lost(self, name: str, cause: str) -> None:
        if cause == "the machine was lost":  # the next driver counts anew
            self._losses.clear()
            self._given_up.clear()
        elif is_engine(name):
            now_s, most = self._host.clock.now_s, self._host.supervisor.model.max_restarts + 1
            losses = self._losses[name] = [at_s for at_s in self._losses.get(name, []) if at_s > now_s - WINDOW_S]
            losses.append(now_s)
            assert len(losses) <= most, f"{name} is lost for the {len(losses)}th time, and {most} are allowed"
            if len(losses) == most:
                self._given_up.add(name)
            if self._recorded is not None and len(losses) == most:
                buffer = self._host.supervisor.processes.get(BUFFER)
                self._look_later(self._recorded, -1 if buffer is None else buffer.epoch)


def _life(process: Process) -> str:
    return f"{process.name} {process.epoch}"
