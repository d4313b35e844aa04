"""Stops of a run by whoever has started it, and who resumes it afterwards.

Invariant: a stop is not over before a checkpoint of what was trained is recorded, where the Learner stood at that when
the Buffer heard of the stop, and neither was lost meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.phases import Phase
from penstock.messages.names import BUFFER, LEARNER
from penstock.messages.training import StopAsked
from penstock.runtime.hosts.virtual.process import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.hosts.virtual.host import Ending, VirtualHost
    from penstock.runtime.hosts.virtual.process import Process
    from trials.oracle import Oracle

REASON: Final = "it was asked to stop"
REPEAT_S: Final = 5.0
"""A Buffer that takes the place of another has not heard of it."""


class Stops:
    """Asks for them, and resumes."""

    def __init__(self, times_s: Sequence[float], host: VirtualHost, oracle: Oracle) -> None:
        self._host, self._oracle = host, oracle
        self._is_wanted = False
        self._can_save: tuple[Process, Process] | None = None
        """The Buffer that was asked, and the Learner that stood where it does."""
        self.num_stops = self.num_saving = 0
        """Stops, and those of them at which what was trained had to be saved."""
        for at_s in times_s:
            host.clock.at(at_s, Stops._ask, self, None)

    def _ask(self, _: None) -> None:
        if not self._is_wanted:
            self._is_wanted = True
            self._say(None)

    def _say(self, _: None) -> None:
        if self._is_wanted:
            self._can_save = self._can_save or self._who_can_save()
            self._host.say(BUFFER, StopAsked(reason=REASON))
            self._host.clock.at(self._host.clock.now_s + REPEAT_S, Stops._say, self, None)

    def _who_can_save(self) -> tuple[Process, Process] | None:
        processes = self._host.supervisor.processes
        buffer, learner = processes.get(BUFFER), processes.get(LEARNER)
        if buffer is None or learner is None or {buffer.status, learner.status} != {Status.RUNNING} or buffer.turn_s:
            return None
        machine = buffer.shell.machine
        assert isinstance(machine, Buffer)
        can = machine.run.phase is Phase.RUNNING and machine.learner.is_level
        return (buffer, learner) if can else None

    def resumes(self, ending: Ending) -> bool:
        """Whether the run has ended because of a stop; then it goes on, in new processes."""
        self._is_wanted = False
        if ending.completed or ending.story != REASON:
            return False
        self.num_stops += 1
        can_save, self._can_save = self._can_save, None
        processes = self._host.supervisor.processes
        if can_save is not None and can_save == (processes.get(BUFFER), processes.get(LEARNER)):
            self.num_saving += 1
            assert ending.finished is not None
            saved = max(0, self._oracle.checkpoint_version)
            assert saved == ending.finished.version, f"stopped at {ending.finished.version}, and saved is {saved}"
        self._host.ending = None
        self._host.lose_machine()
        return True
