"""A recorded run set up again on the virtual host, as it stood at one of its steps, with modelled backends behind it.

Invariants:

* Every actor that lived then handles what it handled, in its own shell, with the clock at the recorded times: so it
  holds the state, the timers and the messages to be repeated that it held. Every command must come out again.
* What was on its way arrives: what is kept until it is settled, and the newest control event of each topic, are said
  again, as after a line was cut, and receivers know what they have had; of the rest what a receiver had not heard, by
  the order of its line.
* A backend owes what its actor had asked for and had no answer to; it began then, and takes as long as its model says,
  so what is left of that is what it still takes. An engine goes on with each response from what was reported of it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.phases import Phase
from penstock.backends.engines.options import engines_kept
from penstock.backends.ledger.memory import MemoryStore
from penstock.backends.simulated.engine import SimulatedEngine
from penstock.backends.simulated.learner import SimulatedLearner
from penstock.backends.simulated.rewards import SimulatedPrompts
from penstock.messages.base import Delivery
from penstock.messages.commands import ApplyWeights, InterruptGenerations
from penstock.messages.errors import UserFault
from penstock.messages.names import is_engine
from penstock.messages.wire import Header
from penstock.runtime.hosts.virtual.host import HostSettings, VirtualHost
from penstock.runtime.hosts.virtual.process import Player, deliver
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from penstock.runtime.observability.recording import Began
from penstock.runtime.prediction.forking.noted import Noted
from penstock.runtime.prediction.forking.past import REPLAY_FIRST
from penstock.runtime.run.replay import Incarnation, merged_rows
from penstock.runtime.run.wiring import build_machine, hears, inbox_union, open_backend

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.actors.machine import Machine
    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Timers
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.prediction.forking.past import Past
    from penstock.runtime.run.plan import RunPlan
    from penstock.runtime.scenario import Scenario

ABOVE_ALL: Final = 1 << 40
"""No process of a run has said so many messages: whatever is said after a fork has a higher id."""


class Restored:
    """The run as it stood, ready to go on."""

    def __init__(
        self,
        past: Past,
        scenario: Scenario,
        successors: RunPlan,
        *,
        replaced: Collection[str] = (),
        validate: bool = False,
    ) -> None:
        """
        Args:
            past: of the recorded run.
            scenario: modelled: how its backends behave from here on.
            successors: what whoever takes an actor's place from here on is built from.
            replaced: actors that are replaced at once; their engines open without the time that it takes otherwise.
            validate: assert the invariants of every actor after each event from here on.

        Raises:
            UserFault: the recording cannot be read, or a command does not come out again.
        """
        self._past = past
        self._successors = successors
        run = replace(scenario.run, keep_samples=False)  # nothing of the run's folder is changed
        count = max(scenario.engines.count, past.plan.scenario.engines.count)  # those that are to leave, too
        modelled = replace(scenario, run=run, engines=replace(scenario.engines, count=count))
        self._backends = replace(past.plan, scenario=modelled, model_folder="", run_folder="")
        at_once = replace(modelled.engines, simulated=replace(modelled.engines.simulated, start_s=0.0))
        self._reopened = replace(self._backends, scenario=replace(modelled, engines=at_once))
        self._replaced = replaced
        self._incarnations = {name: Incarnation(past.files[name].stem, began) for name, began in past.began.items()}
        self.host = VirtualHost((), self._cast, _settings(scenario, validate=validate))
        self.processes: dict[str, Process] = {}
        self.noted = Noted()
        self._fill_ledger()
        for name in past.began:
            self._retrace(name)

    # --- the past -----------------------------------------------------------------------------------------------------

    def _cast(self, name: str, epoch: int, timers: Timers, store: LedgerStore | None) -> Player:
        began = self._past.began.get(name)
        if began is not None and began.epoch == epoch:
            machine: Machine[Any] = self._incarnations[name].machine
        else:
            records = () if store is None else store.entries()
            machine = build_machine(name, self._successors, epoch=epoch, records=records)
        is_reopened = name in self._replaced and began is not None and epoch == began.epoch + 1
        plan = self._reopened if is_reopened else self._backends
        backend = open_backend(name, plan, epoch=epoch, timers=timers, store=store)
        return Player(machine=machine, hears=hears(name), inbox=inbox_union(name), backend=backend)

    def _fill_ledger(self) -> None:
        read, ledger = self._past.ledger, self.host.ledger
        MemoryStore(ledger).fill((*read.records, *read.later))
        for group in () if read.snapshot is None else read.snapshot.groups:
            if group.record is not None and group.record.payload is not None:
                ledger.open[group.group_id] = group.record.payload

    def _retrace(self, name: str) -> None:
        past, clock, incarnation = self._past, self.host.clock, self._incarnations[name]
        clock.begin_at(past.began[name].at_s)
        process = self.processes[name] = self.host.stand_in(name, past.began[name].epoch)
        process.begin_retracing()
        process.shell.say_above(ABOVE_ALL)
        for at_s, _, row in merged_rows([past.files[name]]):
            if at_s > past.at_s:
                break
            if isinstance(row, Began):
                continue
            clock.begin_at(at_s)
            event = incarnation.decoded(row)
            header = Header(row.sender, row.sender_epoch, 0, row.message_id, 0) if row.sender else None
            commands = process.retrace(event, header)
            if not incarnation.moment(row, commands).is_same:
                raise UserFault(
                    f"{past.files[name]}: the past does not come out again at {name} {row.number} ({row.event}), so "
                    f"nothing can follow from it: {REPLAY_FIRST}"
                )
            self.noted.handled(name, row, event, commands, at_s)

    # --- from here on -------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Everyone hears what was on its way, and every backend goes on with what it owes."""
        past, host = self._past, self.host
        given_up = past.absent | self._given_up()
        living = {name: process for name, process in self.processes.items() if name not in given_up}
        for name, process in living.items():
            if is_engine(name):
                self._take_over(process)
            elif isinstance(process.backend, SimulatedLearner):
                process.backend.take_over(is_asleep=self.noted.learner_sleeps)
            elif isinstance(process.backend, SimulatedPrompts):
                process.backend.take_over(self.noted.chosen(name))
        begun = [(at_s, name, command) for name in living for at_s, command in self.noted.owed[name].values()]
        for at_s, name, command in sorted(begun, key=lambda each: each[0]):
            backend = living[name].backend
            assert backend is not None, f"{name} has asked for {command}"
            host.clock.begin_at(at_s)
            backend.execute(command)
        host.clock.begin_at(past.at_s)
        self._mark_heard(living)
        host.supervisor.adopt(living.values(), given_up)
        self._deliver(living)
        for process in living.values():
            process.finish_turn()
        if self.noted.engines:
            host.supervisor.want_engines(self.noted.engines)

    def _given_up(self) -> dict[str, int]:
        """Epochs of those that somebody knows to be lost, and whose successors had not begun."""
        return {
            name: process.epoch
            for name, process in self.processes.items()
            if any(not other.shell.membership.admits(name, process.epoch) for other in self.processes.values())
        }

    def _take_over(self, process: Process) -> None:
        """The modelled engine stands where the recorded one stood."""
        machine, backend, clock = process.shell.machine, process.backend, self.host.clock
        assert isinstance(machine, EngineWorker), f"{process.name} is an engine"
        assert isinstance(backend, SimulatedEngine), "engines of a fork are modelled"
        owed = self.noted.owed[process.name]
        applying = [at_s for at_s, command in owed.values() if isinstance(command, ApplyWeights)]
        clock.begin_at(max(applying, default=self._past.at_s))  # in a swap nothing is generated
        reported_s = self.noted.reported_s[process.name]
        running = [
            (replace(request.generate(), prefix=request.response()), reported_s[request.key, request.issued.attempt])
            for request in machine.requests.running()
        ]
        now_s = clock.now_s
        begun = [(command, max(0.0, now_s - since_s)) for command, since_s in running]
        is_asleep = machine.phase is Phase.ASLEEP
        backend.take_over(machine.weights.version, self.noted.fetched[process.name], begun, is_asleep=is_asleep)
        if machine.phase in (Phase.INTERRUPTING, Phase.SPOILT) and begun:
            backend.execute(InterruptGenerations())

    def _mark_heard(self, living: dict[str, Process]) -> None:
        """Control events that their receivers have heard are kept by their senders, and are no news when they come."""
        for name, process in living.items():
            for outgoing in process.shell.delivery.kept():
                receiver = living.get(outgoing.to)
                if receiver is None or outgoing.event.delivery is not Delivery.CONTROL:
                    continue
                if self.noted.was_heard(name, process.epoch, outgoing):
                    receiver.shell.delivery.knows(name, process.epoch, outgoing)

    def _deliver(self, living: dict[str, Process]) -> None:
        """What was on its way of what nobody repeats."""
        for (name, sender), (to, receiver) in itertools.permutations(living.items(), 2):
            header = Header(name, sender.epoch, 0, ABOVE_ALL, 0)
            for event in self.noted.under_way(name, sender.epoch, to, self._past.began[to].at_s):
                self.host.links.send(name, to, receiver, [(header, event)], deliver)


def _settings(scenario: Scenario, *, validate: bool) -> HostSettings:
    runtime = scenario.runtime
    return HostSettings(
        seed=scenario.run.seed,
        supervision=SupervisionModel(
            heartbeat_timeout_s=runtime.heartbeat_timeout_s,
            max_restarts=runtime.max_restarts,
            fewest_engines=engines_kept(scenario.engines),
            start_s=0.0,  # what takes time is in the models; chance would part futures that are the same
            announce_s=0.0,
        ),
        heartbeat_s=runtime.heartbeat_s,
        resend_after_s=runtime.resend_after_s,
        validate=validate,
    )
