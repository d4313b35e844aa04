"""Engines whose GPUs are still to come: they were asked for, and maybe a node with them is on its way.

Invariants:

* Such an engine has no process and no peer knows it, so nobody waits for it: it counts in no quorum.
* It is started when the launcher lacks nothing any more. If that takes too long it is given up, with the reason.
* A wait that lasts is told: on the terminal, with its age in the actor's line, and in the ledger.

| waits for | who ends it |
|---|---|
| the GPUs of an engine | the launcher; else ``engines.gpu_timeout_s``, or who has it leave |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.membership import EngineNoticed
from penstock.messages.names import SUPERVISOR
from penstock.messages.training import ActorReported
from penstock.messages.waits import waiting_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.hosts.processes.ports import Launcher, RunSink

TOLD_AFTER_S: Final = 3.0
"""Where there is room Ray needs a moment all the same."""
TELL_EVERY_S: Final = 1.0
STARTING: Final = "starting"
"""As ``ActorReported.state``, until its process says what it does."""


class _Wait(NamedTuple):
    epoch: int
    since_s: float
    tell_at_s: float
    is_told: bool = False


class GpuWaits:
    """The engines that wait, for the supervisor."""

    def __init__(
        self,
        launcher: Launcher,
        timeout_s: float,
        *,
        start: Callable[[str, int], None],
        give_up: Callable[[str, int, str, float], None],
        note: Callable[[EngineNoticed], None],
        sink: RunSink,
    ) -> None:
        """
        Args:
            launcher: reserves what engines take.
            timeout_s: how long one may wait.
            start: starts an incarnation of this name and epoch.
            give_up: has the run go on without this incarnation, with the reason and the time.
            note: has the Buffer write it down.
            sink: is told what happens.
        """
        self._launcher, self._timeout_s = launcher, timeout_s
        self._start, self._give_up, self._note, self._sink = start, give_up, note, sink
        self._waits: dict[str, _Wait] = {}

    @property
    def names(self) -> frozenset[str]:
        """Who waits."""
        return frozenset(self._waits)

    def start(self, name: str, epoch: int, now_s: float) -> None:
        """Start this incarnation of an engine as soon as there is what it takes."""
        self._launcher.reserve(name)
        if self._launcher.lacks(name):
            self._waits[name] = _Wait(epoch, now_s, now_s + TOLD_AFTER_S)
        else:
            self._start(name, epoch)

    def drop(self, name: str) -> int:
        """It is not wanted any more; its epoch."""
        return self._waits.pop(name).epoch

    def look(self, now_s: float) -> None:
        """Start those whose GPUs have come, and give those up that have waited for too long; several times a second."""
        for name, wait in list(self._waits.items()):
            lacks, waited_s = self._launcher.lacks(name), now_s - wait.since_s
            if not lacks:
                del self._waits[name]
                if wait.is_told:
                    self._tell(name, wait.epoch, f"its GPUs have come, after {waited_s:.0f} s")
                    self._sink.on_report(ActorReported(name=name, epoch=wait.epoch, state=STARTING))
                self._start(name, wait.epoch)
            elif waited_s >= self._timeout_s:
                del self._waits[name]
                story = f"{lacks} has not come within engines.gpu_timeout_s = {self._timeout_s:g}"
                self._give_up(name, wait.epoch, story, now_s)
            elif now_s >= wait.tell_at_s:
                self._waits[name] = wait._replace(tell_at_s=now_s + TELL_EVERY_S, is_told=True)
                if not wait.is_told:
                    self._tell(name, wait.epoch, f"it waits for {lacks}, {self._timeout_s:g} s at most")
                state = waiting_state(lacks, waited_s)
                self._sink.on_report(ActorReported(name=name, epoch=wait.epoch, state=state))

    def _tell(self, name: str, epoch: int, text: str) -> None:
        self._sink.on_notice(SUPERVISOR, f"{name}: {text}")
        self._note(EngineNoticed(engine=name, engine_epoch=epoch, text=text))
