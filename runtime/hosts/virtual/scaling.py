"""``engines.scale: by_bound`` on the virtual host: hands what the actors do to the scaler, heartbeat by heartbeat, and
its orders to the Buffer, as the supervisor of processes does with their reports.

Invariants:

* A process that is stopped or dead reports nothing, and one that is given up is not heard.
* What was on its way when the machine was lost is forgotten, as the next driver would not know of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.messages.membership import EnginesWanted
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import ActorReported, StepReported
from penstock.runtime.hosts.virtual.process import Status
from penstock.runtime.observability.activity import ActivityClock
from penstock.runtime.shell.engine_scaling import EngineScaler

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.actors.machine import Accounted
    from penstock.messages.base import Event
    from penstock.messages.operator import EnginesAsked
    from penstock.runtime.hosts.virtual.clock import VirtualClock
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.shell.engine_scaling import ScalingSettings


class Scaling:
    """Of one run."""

    def __init__(
        self,
        settings: ScalingSettings,
        clock: VirtualClock,
        *,
        heartbeat_s: float,
        ask: Callable[[EnginesAsked], None],
    ) -> None:
        """
        Args:
            settings: of the scenario.
            clock: of the run.
            heartbeat_s: from one report of an actor to its next.
            ask: says to the Buffer which engines there are to be.
        """
        self._settings, self._clock, self._heartbeat_s, self._ask = settings, clock, heartbeat_s, ask
        self._lanes: dict[str, tuple[Process, ActivityClock]] = {}
        self._scaler = EngineScaler(settings)
        self._last_version = 0
        clock.at(clock.now_s + heartbeat_s, Scaling._beat, self, None)

    def turned(self, process: Process) -> None:
        """A process has done what its turn brought."""
        if process.name != LEARNER and not is_engine(process.name):
            return
        present, lane = self._lanes.get(process.name, (None, None))
        if lane is None or present is not process:
            if present is not None and present.epoch > process.epoch:
                return  # a zombie's time is nobody's
            lane = ActivityClock(self._clock.now_s)
            self._lanes[process.name] = (process, lane)
        activity, occupancy, outside = cast("Accounted", process.shell.machine).shows
        lane.switch(activity, self._clock.now_s, occupancy, outside)

    def heard(self, event: Event, but: frozenset[str]) -> None:
        """The supervisor has heard this, and does without these engines."""
        if isinstance(event, EnginesWanted):
            self._scaler.engines_are(event.engines, but=but)
        elif isinstance(event, StepReported) and event.version > self._last_version:
            self._last_version = event.version
            self._scaler.step()

    def machine_lost(self) -> None:
        """Every process is gone, and the next driver has read nothing."""
        self._lanes.clear()
        self._scaler = EngineScaler(self._settings)

    def _beat(self, _: None) -> None:
        for process, lane in list(self._lanes.values()):
            if process.status is not Status.RUNNING:
                continue
            report = ActorReported(
                name=process.name,
                epoch=process.epoch,
                state=process.shell.machine.state,
                activities=lane.take(self._clock.now_s),
            )
            order = self._scaler.hear(report)
            if order is not None:
                self._ask(order)
        self._clock.at(self._clock.now_s + self._heartbeat_s, Scaling._beat, self, None)
