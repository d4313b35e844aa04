"""Writes what an actor handles to an event log and, where that is asked for, whole to a recording, what a Learner
publishes to a log of weights, and the stages of samples, steps and versions to the traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.messages.commands import Send
from penstock.runtime.observability.subjects import SUBJECTS, subject_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.observability.recording import Recording
    from penstock.runtime.observability.stages import StageRecorder, Stages
    from penstock.runtime.observability.trackers import EventLog
    from penstock.runtime.observability.weights_log import WeightsLog


class _Plans(dict[type["Event"], tuple[str, "Callable[[Any], Any]", "Stages"]]):
    """Of a class of events its name, how to tell what one is about, and what is recorded of it: worked out once, and
    found by one look-up."""

    def __init__(self, stages: StageRecorder | None) -> None:
        super().__init__()
        self._stages = stages
        for kind in SUBJECTS:
            self[kind]

    def __missing__(self, kind: type[Event]) -> tuple[str, Callable[[Any], Any], Stages]:
        stages = (False, None, ()) if self._stages is None else self._stages.after(kind)
        plan = self[kind] = kind.__name__, SUBJECTS.get(kind, subject_text), stages
        return plan


class EventObserver:
    """Implements ``penstock.runtime.shell.shell.Observer`` for one incarnation of an actor."""

    def __init__(
        self,
        log: EventLog,
        *,
        name: str,
        epoch: int,
        now_s: Callable[[], float],
        offset_s: float = 0.0,
        stages: StageRecorder | None = None,
        weights: WeightsLog | None = None,
        recording: Recording | None = None,
    ) -> None:
        """
        Args:
            log: where the events go; whoever made it closes it.
            name: of the actor.
            epoch: its incarnation.
            now_s: seconds of a clock that never goes back.
            offset_s: what turns them into seconds since the start of the run.
            stages: what takes the stages, where there are traces.
            weights: where publishes go, of a Learner; whoever made it closes it.
            recording: what takes each event whole, with its commands; whoever made it closes it.
        """
        self._append = log.append
        self._name = name
        self._epoch = epoch
        self._now_s = now_s
        self._offset_s = offset_s
        self._kept = None if stages is None else stages.kept
        self._plans = _Plans(stages)
        self._on_sent = {} if stages is None else stages.on_sent
        self._on_command = {} if stages is None else stages.on_command
        self._weights = weights
        self._recording = recording

    def handled(self, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """Log the event, and record the stages that it ends or that its commands begin or end."""
        # Most events are about a sample: one look-up and no call of Python's, as either costs as much as the rest.
        name, about_of, (depends, act, others) = self._plans[type(event)]
        about = about_of(event)
        self._append(self._now_s() + self._offset_s, self._name, self._epoch, name, about)
        if self._recording is not None:
            self._recording.add(event, header, commands)
        if self._weights is not None:
            self._weights.saw(event)
        if self._kept is None:
            return
        if not depends or self._kept[about.group_id]:
            if act is not None:
                act(event)
        elif not others:
            return
        for command in commands:
            if type(command) is Send:
                if (tell := self._on_sent.get(type(command.event))) is not None:
                    tell(command.event, command.to)
            elif (begin := self._on_command.get(type(command))) is not None:
                begin(command)

    def failed(self, event: Event, header: Header | None, error: Exception) -> None:
        """Log the event on which the actor has raised: it is the last one."""
        self._append(self._now_s() + self._offset_s, self._name, self._epoch, type(event).__name__, subject_text(event))
        if self._recording is not None:
            self._recording.add(event, header, [], error)
