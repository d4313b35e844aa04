"""Writes what an actor handles to an event log and, where that is asked for, whole to a recording, what a Learner
publishes to a log of weights, and the stages of samples, steps and versions to the traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.commands import Send
from penstock.runtime.observability.subjects import KEY_OF, subject_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import SampleKey
    from penstock.messages.wire import Header
    from penstock.runtime.observability.recording import Recording
    from penstock.runtime.observability.stages import StageRecorder
    from penstock.runtime.observability.trackers import EventLog
    from penstock.runtime.observability.weights_log import WeightsLog

_UNASKED: Final[Collection[object]] = ()


class EventObserver:
    """Implements ``penstock.runtime.shell.shell.Observer`` for one incarnation of an actor."""

    def __init__(
        self,
        log: EventLog,
        *,
        name: str,
        epoch: int,
        now_s: Callable[[], float],
        stages: StageRecorder | None = None,
        weights: WeightsLog | None = None,
        recording: Recording | None = None,
    ) -> None:
        """
        Args:
            log: where the events go; whoever made it closes it.
            name: of the actor.
            epoch: its incarnation.
            now_s: seconds since the start of the run.
            stages: what takes the stages, where there are traces.
            weights: where publishes go, of a Learner; whoever made it closes it.
            recording: what takes each event whole, with its commands; whoever made it closes it.
        """
        self._append = log.append
        self._name = name
        self._epoch = epoch
        self._now_s = now_s
        self._kept = None if stages is None else stages.kept
        self._of_samples = {
            kind: (key_of, _UNASKED if stages is None else stages.others_after(kind)) for kind, key_of in KEY_OF.items()
        }
        """How to tell which sample an event is about, and what else its commands may be about."""
        self._on_event = {} if stages is None else stages.on_event
        self._on_sent = {} if stages is None else stages.on_sent
        self._on_command = {} if stages is None else stages.on_command
        self._weights = weights
        self._recording = recording

    def handled(self, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """Log the event, and record the stages that it ends or that its commands begin or end."""
        kind = type(event)
        of_sample = self._of_samples.get(kind)  # here, as most events are about one, and a call costs as much as this
        key: SampleKey | None = None
        others = _UNASKED
        about: str | SampleKey
        if of_sample is None:
            about = subject_text(event)
        else:
            key_of, others = of_sample
            about = key = key_of(event)
        self._append(self._now_s(), self._name, self._epoch, kind.__name__, about)
        if self._recording is not None:
            self._recording.add(event, header, commands)
        if self._weights is not None:
            self._weights.saw(event)
        if self._kept is None:
            return
        if key is None or self._kept[key.group_id]:
            if (act := self._on_event.get(kind)) is not None:
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
        self._append(self._now_s(), self._name, self._epoch, type(event).__name__, subject_text(event))
        if self._recording is not None:
            self._recording.add(event, header, [], error)
