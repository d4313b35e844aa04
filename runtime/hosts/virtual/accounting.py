"""What a virtual run shows of itself: time accounting of whoever has a lane, steps, and, if asked, the run's files.

Invariants:

* The spans of an actor tile the run from its start to its end, whatever incarnation they belong to.
* Watching changes nothing of what happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.messages.evaluation import EvaluationFinished
from penstock.messages.names import has_lane
from penstock.messages.training import ActorReported, StepReported
from penstock.runtime.observability.activity import ActivityClock, LaneTiler
from penstock.runtime.observability.shares import Shares
from penstock.runtime.observability.subjects import subject_text
from penstock.runtime.observability.trackers import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.actors.machine import Accounted
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.training import ActivitySpan
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.clock import VirtualClock
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.observability.figures import RunFigures
    from penstock.runtime.observability.recorder import RunRecorder
    from penstock.runtime.observability.trackers import EventLog


class _Lane:
    """The time of one actor: the clock of its present incarnation, and what all of them came to."""

    __slots__ = ("clock", "machine", "process", "shares", "shows", "tiler")

    def __init__(self, process: Process, now_s: float, begins_s: float) -> None:
        self.tiler = LaneTiler()
        self.tiler.end_s = begins_s
        self.shares = Shares()
        self.begin(process, now_s)

    def begin(self, process: Process, now_s: float) -> None:
        """A new incarnation is there."""
        self.process = process
        self.machine = cast("Accounted", process.shell.machine)
        self.clock = ActivityClock(now_s)
        self.shows = self.clock.activity, -1.0, 0.0
        """Activity, occupancy and what waits for tools, as the clock has them."""

    def take(self, now_s: float) -> tuple[ActivitySpan, ...]:
        """What it did until now, or until it was killed: after that its lane is down, whoever has noticed."""
        spans = self.clock.take(min(now_s, self.process.died_s))
        self.shares.add(self.tiler.add(spans))
        return spans


class RunAccounts:
    """Watches a run for people; implements :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(
        self,
        clock: VirtualClock,
        figures: RunFigures,
        *,
        recorder: RunRecorder | None = None,
        events: EventLog | None = None,
        on_step: Callable[[StepReported], None] | None = None,
        begins_s: float = 0.0,
    ) -> None:
        """
        Args:
            clock: of the run.
            figures: of the recorder where there is one, otherwise kept up here.
            recorder: writes the run's files.
            events: takes every handled event.
            on_step: hears of every step.
            begins_s: when the lanes begin.
        """
        self.progress_s = 0.0
        """When the last step was reported."""
        self.step_times: list[float] = []
        self.evaluations: dict[int, EvaluationFinished] = {}
        """Those that are done, by number."""
        self._clock = clock
        self._figures = figures
        self._recorder = recorder
        self._events = events
        self._on_step = on_step
        self._begins_s = begins_s
        self._lanes: dict[str, _Lane] = {}
        self._without_lane: set[str] = set()

    # --- what happens -----------------------------------------------------------------------------------------

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if self._events is not None:
            name, epoch = process.name, process.epoch
            self._events.append(self._clock.now_s, name, epoch, type(event).__name__, subject_text(event))

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def heard(self, process: Process, event: Event) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if isinstance(event, StepReported) and event.version > len(self.step_times):
            self.progress_s = self._clock.now_s
            self.step_times.append(self.progress_s)
            self.report_all()
            if self._recorder is not None:
                self._recorder.step(event, self.progress_s)
            else:
                self._figures.step(event, StepRow.of(self.progress_s, event))
            if self._on_step is not None:
                self._on_step(event)
        elif isinstance(event, EvaluationFinished):
            self.evaluations[event.number] = event
            if self._recorder is not None:
                self._recorder.evaluated(event, self._clock.now_s)

    def turned(self, process: Process) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        name = process.name
        lane = self._lanes.get(name)
        if lane is None:
            if name in self._without_lane:
                return
            if not has_lane(name):
                self._without_lane.add(name)
                return
            lane = self._lanes[name] = _Lane(process, self._clock.now_s, self._begins_s)
        elif lane.process is not process:
            if lane.process.epoch > process.epoch:
                return  # a zombie's time is nobody's
            self._report(lane)
            lane.begin(process, self._clock.now_s)
        shows = lane.machine.shows
        if shows is not lane.shows and shows != lane.shows:
            lane.shows = shows
            lane.clock.switch(shows[0], self._clock.now_s, shows[1], shows[2])

    def lost(self, name: str, cause: str) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        lane = self._lanes.get(name)
        if lane is not None:
            self._report(lane)
            lane.tiler.lost()
        if self._recorder is not None:
            self._recorder.lost(name, f"{name} was lost: {cause}")
        else:
            self._figures.lost(name)

    # --- what it comes to -------------------------------------------------------------------------------------

    def report_all(self) -> None:
        """Bring the books up to now."""
        for lane in self._lanes.values():
            self._report(lane)

    def close(self) -> None:
        """The run is over."""
        self.report_all()
        for lane in self._lanes.values():
            lane.shares.add(lane.tiler.close(self._clock.now_s))

    def shares_of(self, is_meant: Callable[[str], bool]) -> Shares:
        """The time of all actors of these names together."""
        total = Shares()
        for name, lane in self._lanes.items():
            if is_meant(name):
                for activity, seconds in lane.shares.seconds.items():
                    total.seconds[activity] += seconds
                total.occupied_s += lane.shares.occupied_s
        return total

    def _report(self, lane: _Lane) -> None:
        process = lane.process
        report = ActorReported(
            name=process.name,
            epoch=process.epoch,
            state=process.shell.machine.state,
            activities=lane.take(self._clock.now_s),
            metrics=() if process.backend is None else process.backend.gauges(),
        )
        if self._recorder is not None:
            self._recorder.actor(report, self._clock.now_s)
        else:
            self._figures.actor(report, self._clock.now_s)
