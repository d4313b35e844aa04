"""From span tuples to OpenTelemetry: the background thread, and the file in the run's folder.

Invariants:

* Nothing here runs on the thread of an actor. Exporting is late by at most the interval, never in the way.
* The file is OTLP/JSON as the OpenTelemetry Protocol's file exporter has it: each line one ``TracesData`` object with
  the spans of one actor. A collector's OTLP JSON file receiver reads it as it stands.
* A collector that is slow or gone costs its own spans only: its queue is bounded, what does not fit is counted, and
  the file goes on.
* ``close`` returns within its deadline, whatever the exporters do.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

from penstock.messages.errors import UserFault
from penstock.runtime.observability.gen_ai import conventional
from penstock.runtime.observability.jsonl import JsonLinesWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.spans import AttributeValue, SpanRecorder, SpanTuple

SCOPE_NAME: Final = "penstock"
SPANS_PER_EXPORT: Final = 512
EXPORT_INTERVAL_S: Final = 0.5
NEWS_INTERVAL_S: Final = 0.02
"""Between two exports where the recorder asks for them; what comes meanwhile goes together."""
MAX_QUEUED_EXPORTS: Final = 64
"""Batches that wait for a collector: 32,768 spans, about 50 MB."""
OTLP_TIMEOUT_S: Final = 5.0
_CLOSE_GRACE_S: Final = 0.2
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope(SCOPE_NAME)


def actor_resource(name: str, epoch: int) -> Resource:
    """The OpenTelemetry resource of one incarnation of an actor."""
    return Resource(
        {
            "service.name": "penstock",
            "service.instance.id": f"{name}#{epoch}",
            "penstock.actor": name,
            "penstock.epoch": epoch,
            "process.pid": os.getpid(),
        }
    )


def readable_span(span: SpanTuple, resource: Resource) -> ReadableSpan:
    """The OpenTelemetry span of a tuple, as the SDK's exporters take it."""
    trace_bytes, span_id, parent_id, name, start_ns, end_ns, attributes, links = span
    ours = dict(attributes)
    trace_id = int.from_bytes(trace_bytes, "big")
    return ReadableSpan(
        name=name,
        context=_context(trace_id, span_id),
        parent=_context(trace_id, parent_id) if parent_id else None,
        resource=resource,
        attributes={**ours, **conventional(name, ours)},
        links=[Link(_context(int.from_bytes(trace, "big"), linked)) for trace, linked in links],
        kind=SpanKind.INTERNAL,
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=_SCOPE,
    )


class FileSpanExporter(SpanExporter):
    """Appends each batch as one line of OTLP/JSON to a file."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesWriter(path, lines_per_write=1)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the batch; the line is with the operating system when this returns."""
        if spans:
            self._lines.append(_traces_data(spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._lines.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing waits here: every batch is written as it comes."""
        return True


def otlp_exporter(endpoint: str) -> SpanExporter:
    """The SDK's OTLP/HTTP exporter for a collector.

    Args:
        endpoint: a base URL such as ``http://collector:4318``, or one that ends in ``/v1/traces``.

    Raises:
        UserFault: the endpoint is no HTTP URL.
    """
    # Imported here because it costs 50 ms and most runs have no collector.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if not endpoint.startswith(("http://", "https://")):
        raise UserFault(
            f"observability.otlp_endpoint must be an http:// or https:// URL such as http://localhost:4318, "
            f"got {endpoint!r}"
        )
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(
        endpoint=base if base.endswith("/v1/traces") else f"{base}/v1/traces", timeout=OTLP_TIMEOUT_S
    )


class _QueuedExport:
    """A thread of its own for an exporter that may block, behind a bounded queue."""

    def __init__(self, exporter: SpanExporter, max_queued: int) -> None:
        self.num_exported = 0
        self.num_dropped = 0
        self._exporter = exporter
        self._max_queued = max_queued
        self._queue: deque[list[ReadableSpan]] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="span-collector", daemon=True)
        self._thread.start()

    def offer(self, spans: list[ReadableSpan]) -> None:
        if len(self._queue) >= self._max_queued:
            self.num_dropped += len(spans)
            return
        self._queue.append(spans)
        self._wake.set()

    def close(self, deadline: float) -> bool:
        self._is_closing = True
        self._wake.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._exporter.shutdown()  # wakes an export that waits to try again
        self._thread.join(_CLOSE_GRACE_S)
        self.num_dropped += sum(len(spans) for spans in self._queue)
        self._queue.clear()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._queue:
                spans = self._queue.popleft()
                if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                    self.num_exported += len(spans)
                else:
                    self.num_dropped += len(spans)
            if self._is_closing and not self._queue:
                return


class SpanExporterThread:
    """Drains a recorder into the run's folder, and to a collector where there is one."""

    def __init__(
        self,
        recorder: SpanRecorder,
        file: SpanExporter,
        *,
        resource: Resource,
        collector: SpanExporter | None = None,
        interval_s: float = EXPORT_INTERVAL_S,
        max_queued_exports: int = MAX_QUEUED_EXPORTS,
    ) -> None:
        self.num_exported = 0
        """Spans that are in the file."""
        self.error: OSError | None = None
        """Why the file could not be written; spans from then on are dropped and counted."""
        self._recorder = recorder
        self._file = file
        self._resource = resource
        self._interval_s = interval_s
        self._num_lost = 0
        self._collector = None if collector is None else _QueuedExport(collector, max_queued_exports)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)

    @property
    def num_dropped(self) -> int:
        """Spans that are not in the file."""
        return self._recorder.num_dropped + self._num_lost

    @property
    def num_collected(self) -> int:
        """Spans that the collector has taken."""
        return 0 if self._collector is None else self._collector.num_exported

    @property
    def num_not_collected(self) -> int:
        """Spans that did not reach the collector, because it was slow or refused them."""
        return 0 if self._collector is None else self._collector.num_dropped

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write out what was recorded so far and end; returns whether everything was done in time."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        self._recorder.has_news.set()
        self._thread.join(timeout_s)
        is_done = not self._thread.is_alive()
        if self._collector is not None:
            is_done = self._collector.close(deadline) and is_done
        if not self._thread.is_alive():
            self._file.shutdown()
        return is_done

    def _run(self) -> None:
        has_news = self._recorder.has_news
        while not self._stop.wait(min(NEWS_INTERVAL_S, self._interval_s)):
            has_news.wait(self._interval_s)
            has_news.clear()
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while batch := self._recorder.take(SPANS_PER_EXPORT):
            spans = [readable_span(span, self._resource) for span in batch]
            self._write(spans)
            if self._collector is not None:
                self._collector.offer(spans)

    def _write(self, spans: list[ReadableSpan]) -> None:
        if self.error is None:
            try:
                self._file.export(spans)
            except OSError as error:
                # A full disk must not end the actor: what may be lost here is the trace, and it is counted.
                self.error = error
            else:
                self.num_exported += len(spans)
                return
        self._num_lost += len(spans)


def _context(trace_id: int, span_id: bytes) -> SpanContext:
    return SpanContext(trace_id, int.from_bytes(span_id, "big"), is_remote=False, trace_flags=_SAMPLED)


def _traces_data(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """The OTLP/JSON ``TracesData`` of spans that share one resource: ids in hex, 64-bit integers as strings."""
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    scope_spans = [{"scope": {"name": SCOPE_NAME}, "spans": [_span(span) for span in spans]}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scope_spans}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.context
    assert context is not None  # readable_span gives every span one
    data: dict[str, Any] = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    if span.parent is not None:
        data["parentSpanId"] = f"{span.parent.span_id:016x}"
    data["name"] = span.name
    data["kind"] = 1  # SPAN_KIND_INTERNAL
    data["startTimeUnixNano"] = str(span.start_time)
    data["endTimeUnixNano"] = str(span.end_time)
    if span.attributes:
        data["attributes"] = _attributes(span.attributes)
    if span.links:
        contexts = [link.context for link in span.links]
        data["links"] = [{"traceId": f"{to.trace_id:032x}", "spanId": f"{to.span_id:016x}"} for to in contexts]
    return data


def _attributes(attributes: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - the SDK's mapping of mixed values
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}
