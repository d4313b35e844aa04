"""Watches who holds the devices that learner and engines share.

What it checks, from commands and from what backends answer, whatever the actors believe:

* no engine opens, wakes or generates while the learner holds them;
* the learner does not open, wake, train or publish while an engine holds them;
* nobody opens or wakes while a predecessor of its name holds them.

Who has ended holds what it held until all that it had started has ended as well; so does one that is stopped, cannot be
killed, and was given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.commands import (
    ApplyWeights,
    Generate,
    OpenEngine,
    OpenLearner,
    PublishWeights,
    Train,
    WakeLearner,
)
from penstock.messages.local import EngineSlept, LearnerSlept
from penstock.messages.names import LEARNER
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.host import VirtualHost
    from penstock.runtime.hosts.virtual.process import Process

SLEPT: Final = frozenset((EngineSlept, LearnerSlept))


class DeviceWatch(IdleWatcher):
    """Asserts after every event."""

    def __init__(self, engines: Iterable[str], host: VirtualHost) -> None:
        self.num_turns = 0
        """Times that the learner took the devices."""
        self._engines = frozenset(engines)
        self._clock = host.clock
        self._holders: dict[str, Process] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if type(event) in SLEPT and self._holders.get(process.name) is process:
            del self._holders[process.name]
        for command in commands:
            match command:
                case OpenEngine() | ApplyWeights() if process.name in self._engines:
                    self._take(process, command, others=(LEARNER,))
                case Generate() if process.name in self._engines:
                    assert self._holds(process.name), f"{process.name} generates asleep"
                    self._assert_free(process, command, (LEARNER,))
                case OpenLearner() | WakeLearner():
                    self.num_turns += 1
                    self._take(process, command, others=self._engines)
                case Train() | PublishWeights():
                    assert self._holds(LEARNER), f"the learner is told to {type(command).__name__} asleep"
                    self._assert_free(process, command, self._engines)
                case _:
                    pass

    def _take(self, process: Process, command: AnyCommand, others: Iterable[str]) -> None:
        self._assert_free(process, command, others)
        self._holders[process.name] = process

    def _assert_free(self, process: Process, command: AnyCommand, others: Iterable[str]) -> None:
        held = [name for name in (process.name, *others) if self._holds(name) and self._holders[name] is not process]
        assert not held, f"{process.name} is told to {type(command).__name__} while {', '.join(sorted(held))} is awake"

    def _holds(self, name: str) -> bool:
        holder = self._holders.get(name)
        return holder is not None and self._clock.now_s < holder.released_s
