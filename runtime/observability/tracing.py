"""The trace of an actor: watches its shell and records a span for every event that it handles.

Invariants:

* Nothing that is recorded changes what the actor does; the trace context in a header only names a parent.
* The span of an event stands in the trace of what the event is about. An event about nothing in particular (a timer,
  a settlement) has its span in a trace of its actor.
* A sample that is not sampled costs a few dictionary look-ups an event and records nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from penstock.messages.commands import Send
from penstock.runtime.observability.spans import NO_PARENT, actor_trace_id, root_span_id
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.subjects import subject_of
from penstock.runtime.observability.trace_ids import UNTRACED, TraceIds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.observability.spans import SpanRecorder

_TRACE: Final = slice(0, 16)
_SPAN: Final = slice(16, 24)


class TraceObserver:
    """Implements ``penstock.runtime.shell.shell.Observer`` for one incarnation of an actor."""

    def __init__(
        self,
        recorder: SpanRecorder,
        *,
        run_salt: bytes,
        name: str,
        epoch: int,
        fraction: float = 1.0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """
        Args:
            recorder: where the spans go.
            run_salt: the 16 bytes that all processes of the run share.
            name: of the actor.
            epoch: its incarnation.
            fraction: share of the samples that is traced, in [0, 1]; also of the events that concern no sample.
            clock_ns: Unix time in nanoseconds.
        """
        self._record = recorder.record
        self._clock_ns = clock_ns
        self._fraction = fraction
        self._ids = TraceIds(run_salt, fraction)
        self._stages = StageRecorder(recorder, self._ids)
        self._actor_trace = actor_trace_id(run_salt, name, epoch)
        self._untied_credit = 0.0
        self._span_names: dict[type[Event], str] = {}
        self._causes: dict[int, bytes] = {}
        """By ``id`` of the events that this turn sends: the context of the handling that sent them. The shell holds
        the events until the turn ends, so an id cannot be used again before."""
        self._turn_has_ended = False

    def clock_ns(self) -> int:
        """Unix time in nanoseconds."""
        return self._clock_ns()

    def handled(
        self, event: Event, header: Header | None, start_ns: int, end_ns: int, commands: list[AnyCommand]
    ) -> None:
        """Record the span of a handled event, and the stages that it ends or that its commands begin."""
        if self._turn_has_ended:
            self._causes.clear()
            self._turn_has_ended = False
        trace_id, parent_id = self._place(event, header)
        context = UNTRACED
        if trace_id:
            name = self._span_names.get(type(event)) or self._name(type(event))
            context = trace_id + self._record(trace_id, parent_id, name, start_ns, end_ns)
        stages = self._stages
        stages.event(event, start_ns, end_ns)
        for command in commands:
            if isinstance(command, Send):
                if context:
                    self._causes[id(command.event)] = context
                stages.sent(command.event, command.to, start_ns, end_ns)
            else:
                stages.command(command, end_ns)

    def trace_of(self, event: Event, cause: bytes) -> bytes:
        """The trace context of an event that is being sent: 16 bytes of trace id and 8 of the parent's span id;
        nothing when the event is about nothing in particular or its sample is not traced.

        Args:
            event: what is sent, in the turn in which ``handled`` saw the command.
            cause: the context that the handled event came with.
        """
        self._turn_has_ended = True
        subject = subject_of(event)
        if subject is None:
            return UNTRACED
        trace_id = self._ids.of(subject)
        if not trace_id:
            return UNTRACED
        handling = self._causes.get(id(event), cause)
        return handling if handling[_TRACE] == trace_id else trace_id + root_span_id(trace_id)

    def _place(self, event: Event, header: Header | None) -> tuple[bytes, bytes]:
        """Trace and parent of the span of an event."""
        subject = subject_of(event)
        if subject is None:
            # Kept at the same rate as samples, so that a small fraction makes a small trace.
            self._untied_credit += self._fraction
            if self._untied_credit < 1.0:
                return UNTRACED, NO_PARENT
            self._untied_credit -= 1.0
            return self._actor_trace, NO_PARENT
        trace_id = self._ids.of(subject)
        if header is not None and trace_id and header.trace[_TRACE] == trace_id:
            return trace_id, header.trace[_SPAN]
        return trace_id, root_span_id(trace_id)

    def _name(self, kind: type[Event]) -> str:
        name = self._span_names[kind] = f"handle {kind.__name__}"
        return name
