"""Watches engines that are lent the learner's devices, beside who holds these (``device_watch.py``).

Invariants:

* An engine that gives its device back keeps no request: what it had goes on elsewhere.
* WeightPublisher tells an engine nothing, and waits for nothing of it, from when it has heard that its device was taken
  back until it has heard of its next turn.
* The learner lends nothing while it has a batch, and nothing to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.learner.machine import Learner
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.messages.commands import ReplaceActor, Send, SleepLearner
from penstock.messages.training import BatchReady, DeviceYielded
from penstock.messages.weights import EngineReady, WeightsCommitted, WeightsStaged
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class LendingWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self, engines: Iterable[str]) -> None:
        self.num_lent = 0
        """Times that the learner slept for others."""
        self._engines = frozenset(engines)
        self._turns: dict[tuple[Process, str, int], tuple[int, bool]] = {}
        """By incarnation of WeightPublisher and of an engine: the last turn that it heard of; whether that is over."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        machine = process.shell.machine
        if isinstance(machine, EngineWorker) and process.name in self._engines:
            for command in commands:
                if isinstance(command, Send) and isinstance(command.event, DeviceYielded):
                    kept = [lease.key for lease in machine.leases() if lease.stage in ("waiting", "running")]
                    assert not kept, f"{process.name} gives its device back and keeps {kept}"
        elif isinstance(machine, WeightPublisher):
            self._at_publisher(process, machine, event, commands)
        elif isinstance(machine, Learner) and any(isinstance(command, SleepLearner) for command in commands):
            self.num_lent += 1
            assert machine.turns.has_takers, "the learner lends its devices to nobody"
            assert not isinstance(event, BatchReady), "the learner lends its devices though it has a batch"

    def _at_publisher(
        self, process: Process, machine: WeightPublisher, event: Event, commands: list[AnyCommand]
    ) -> None:
        if isinstance(event, EngineReady) and event.engine in self._engines:
            life = process, event.engine, event.engine_epoch
            known, _ = self._turns.get(life, (-1, False))
            if event.turn >= known:
                self._turns[life] = event.turn, not event.num_slots
        over = {
            name: epoch
            for (publisher, name, epoch), (_, is_over) in self._turns.items()
            if publisher is process and is_over
        }
        for command in commands:
            match command:
                case Send(to=name, event=WeightsStaged() | WeightsCommitted()):
                    assert over.get(name) != machine.engines.by_name[name].epoch, (
                        f"{name} sleeps, and is told of weights"
                    )
                case ReplaceActor(name=name, epoch=epoch, cause=cause):
                    assert over.get(name) != epoch, f"{name} sleeps, and is replaced: {cause}"
                case _:
                    pass
