"""Writes what an actor handles to an event log and, where that is asked for, whole to a recording, and what a Learner
publishes to a log of weights; and lets another observer watch too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.runtime.observability.subjects import KEY_OF, OF_ONE_GROUP, subject_text
from penstock.runtime.shell.shell import NO_CONTEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.observability.recording import Recording
    from penstock.runtime.observability.trackers import EventLog
    from penstock.runtime.observability.weights_log import WeightsLog
    from penstock.runtime.shell.shell import Contexts, Observer


class EventObserver:
    """Implements ``penstock.runtime.shell.shell.Observer`` for one incarnation of an actor."""

    def __init__(
        self,
        log: EventLog,
        *,
        name: str,
        epoch: int,
        now_s: Callable[[], float],
        inner: Observer | None = None,
        weights: WeightsLog | None = None,
        recording: Recording | None = None,
    ) -> None:
        """
        Args:
            log: where the events go; whoever made it closes it.
            name: of the actor.
            epoch: its incarnation.
            now_s: seconds since the start of the run.
            inner: who else watches, such as a ``TraceObserver``.
            weights: where publishes go, of a Learner; whoever made it closes it.
            recording: what takes each event whole, with its commands; whoever made it closes it.
        """
        self._append = log.append
        self._name = name
        self._epoch = epoch
        self._now_s = now_s
        self._inner = inner
        self._weights = weights
        self._recording = recording
        self.clock_ns: Callable[[], int] = time.time_ns if inner is None else inner.clock_ns
        """Unix time in nanoseconds, or what the inner observer takes for it."""

    def handled(
        self, event: Event, header: Header | None, start_ns: int, end_ns: int, commands: list[AnyCommand]
    ) -> Contexts:
        """Log the event; what is returned is the inner observer's."""
        kind, inner = type(event), self._inner
        key_of = KEY_OF.get(kind)  # looked up here, as most events are about a sample, and a call costs as much as this
        subject = str(key_of(event)) if key_of is not None else subject_text(event)
        self._append(self._now_s(), self._name, self._epoch, kind.__name__, subject)
        if self._recording is not None:
            self._recording.add(event, header, commands)
        if self._weights is not None:
            self._weights.saw(event)
        if inner is None:
            return NO_CONTEXTS
        if key_of is not None and header is not None and not header.trace and (not commands or kind in OF_ONE_GROUP):
            return NO_CONTEXTS  # its sender has left the group out, and nothing of another follows: most that is heard
        return inner.handled(event, header, start_ns, end_ns, commands)

    def failed(self, event: Event, header: Header | None, error: Exception) -> None:
        """Log the event on which the actor has raised: it is the last one."""
        self._append(self._now_s(), self._name, self._epoch, type(event).__name__, subject_text(event))
        if self._recording is not None:
            self._recording.add(event, header, [], error)
        if self._inner is not None:
            self._inner.failed(event, header, error)
