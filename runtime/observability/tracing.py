"""The trace of an actor: watches its shell and records a span for every event that it handles.

Invariants:

* Nothing that is recorded changes what the actor does; the trace context in a header names a parent, and where it is
  missing the event's group was left out by its sender, who leaves out the same ones.
* The span of an event stands in the trace of what the event is about. An event about nothing in particular (a timer,
  a settlement) has its span in a trace of its actor.
* A group that is not traced costs look-ups for each event that is handled or sent, a hash at PromptSource, which
  decides, and one at Scorer and Learner, whom nobody tells; the others hear it from whoever sends. What Scorer and
  Filter do for one of its samples is about the same group, so nobody looks at it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from penstock.messages.commands import Send
from penstock.runtime.observability.spans import NO_PARENT, SPAN_ID_BYTES, actor_trace_id, root_span_id
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.subjects import OF_ONE_GROUP
from penstock.runtime.observability.trace_ids import UNTRACED, TraceIds
from penstock.runtime.shell.shell import NO_CONTEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.observability.spans import SpanRecorder
    from penstock.runtime.shell.shell import Contexts

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
            fraction: share of the groups that is traced, in [0, 1]; also of the events that concern no sample.
            clock_ns: Unix time in nanoseconds.
        """
        self._record = recorder.record
        self.clock_ns = clock_ns
        """Unix time in nanoseconds."""
        self._fraction = fraction
        ids = TraceIds(run_salt, fraction)
        self._key_of, self._of_event, self._trace_of = ids.key_of, ids.of_event, ids.trace_of
        self._keeps, self._told, self._trim = ids.keeps, ids.told, ids.trim
        stages = StageRecorder(recorder, ids)
        self._on_event, self._on_sent, self._on_command = stages.on_event, stages.on_sent, stages.on_command
        self._actor_trace = actor_trace_id(run_salt, name, epoch)
        self._untied_credit = 0.0
        self._span_names: dict[type[Event], str] = {}

    def handled(
        self, event: Event, header: Header | None, start_ns: int, end_ns: int, commands: list[AnyCommand]
    ) -> Contexts:
        """Record the span of a handled event, and the stages that it ends or that its commands begin.

        Returns the trace contexts of what is sent: 16 bytes of trace id and 8 of the parent's span id. An event about
        nothing in particular, or about a group that is not traced, has none.
        """
        kind, trace_id, context = type(event), UNTRACED, UNTRACED
        keys, keeps = self._key_of, self._keeps
        if (key_of := keys.get(kind)) is not None:
            key = key_of(event)
            if header is not None and not header.trace:
                self._told(key.group_id, False)
            elif keeps(key.group_id):
                trace_id = self._trace_of(key)
            elif kind in OF_ONE_GROUP:
                return NO_CONTEXTS
        elif (find := self._of_event.get(kind)) is not None:
            trace_id = find(event)
        else:
            self._untied(kind, event, start_ns, end_ns)
        if trace_id:  # spelt out: a traced sample is one call less for each of its events
            name = self._span_names.get(kind) or self._name(kind)
            is_caused = header is not None and header.trace.startswith(trace_id)
            parent_id = header.trace[_SPAN] if header is not None and is_caused else trace_id[:SPAN_ID_BYTES]
            context = trace_id + self._record(trace_id, parent_id, name, start_ns, end_ns)
            if (act := self._on_event.get(kind)) is not None:
                act(event, start_ns, end_ns)
        contexts: dict[int, bytes] | None = None
        for command in commands:
            if type(command) is not Send:
                if (begin := self._on_command.get(type(command))) is not None:
                    begin(command, end_ns)
                continue
            sent = command.event
            if (key_of := keys.get(type(sent))) is not None:
                if not keeps((key := key_of(sent)).group_id):
                    continue  # nearly all that is sent, where few groups are traced
                sent_id = self._trace_of(key)
            else:
                find = self._of_event.get(type(sent))
                sent_id = UNTRACED if find is None else find(sent)
            if sent_id:
                contexts = {} if contexts is None else contexts
                contexts[id(sent)] = context if sent_id == trace_id else sent_id + root_span_id(sent_id)
                if (tell := self._on_sent.get(type(sent))) is not None:
                    tell(sent, command.to, start_ns, end_ns)
        return NO_CONTEXTS if contexts is None else contexts

    def failed(self, event: Event, header: Header | None, error: Exception) -> None:
        """There is no span of what was not handled."""

    def _untied(self, kind: type[Event], event: Event, start_ns: int, end_ns: int) -> None:
        """An event about nothing in particular, which is kept at the same rate as groups are, so that a small fraction
        makes a small trace. What it sends is about something, and hangs on the root of that."""
        self._trim()
        self._untied_credit += self._fraction
        if self._untied_credit >= 1.0:
            self._untied_credit -= 1.0
            name = self._span_names.get(kind) or self._name(kind)
            self._record(self._actor_trace, NO_PARENT, name, start_ns, end_ns)
        if (act := self._on_event.get(kind)) is not None:
            act(event, start_ns, end_ns)

    def _name(self, kind: type[Event]) -> str:
        name = self._span_names[kind] = f"handle {kind.__name__}"
        return name
