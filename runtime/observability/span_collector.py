"""Spans for a collector: as OpenTelemetry's SDK has them, over OTLP/HTTP.

Invariants:

* A collector that is slow or gone costs its own spans only: its queue is bounded, what does not fit is counted, and
  the file goes on.
* A collector is told what the file holds, span by span: ids, times, names, attributes and links.

It is imported where there is a collector, and nowhere else: the SDK costs every process a tenth of a second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

from penstock.messages.errors import UserFault
from penstock.runtime.observability.group_spans import unpacked
from penstock.runtime.observability.otlp_json import SCOPE_NAME, all_attributes
from penstock.runtime.observability.spans import decoded_span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.observability.spans import AttributeValue, SpanTuple

MAX_QUEUED_EXPORTS: Final = 64
"""Batches that wait for a collector: 32,768 spans, about 12 MB."""
OTLP_TIMEOUT_S: Final = 5.0
_CLOSE_GRACE_S: Final = 0.2
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope(SCOPE_NAME)


def readable_span(span: SpanTuple, resource: Resource) -> ReadableSpan:
    """The OpenTelemetry span of a tuple, as the SDK's exporters take it."""
    trace_bytes, span_id, parent_id, name, start_ns, end_ns, _, links = span
    trace_id = int.from_bytes(trace_bytes, "big")
    return ReadableSpan(
        name=name,
        context=_context(trace_id, span_id),
        parent=_context(trace_id, parent_id) if parent_id else None,
        resource=resource,
        attributes=dict(all_attributes(span)),
        links=[Link(_context(int.from_bytes(trace, "big"), linked)) for trace, linked in links],
        kind=SpanKind.INTERNAL,
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=_SCOPE,
    )


def otlp_exporter(endpoint: str) -> SpanExporter:
    """The SDK's OTLP/HTTP exporter for a collector.

    Args:
        endpoint: a base URL such as ``http://collector:4318``, or one that ends in ``/v1/traces``.

    Raises:
        UserFault: the endpoint is no HTTP URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise UserFault(
            f"observability.otlp_endpoint must be an http:// or https:// URL such as http://localhost:4318, "
            f"got {endpoint!r}"
        )
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(
        endpoint=base if base.endswith("/v1/traces") else f"{base}/v1/traces", timeout=OTLP_TIMEOUT_S
    )


class SpanCollector:
    """A thread of its own for an exporter that may block, behind a bounded queue."""

    def __init__(
        self, exporter: SpanExporter, resource: Mapping[str, AttributeValue], *, max_queued: int = MAX_QUEUED_EXPORTS
    ) -> None:
        """
        Args:
            exporter: tells the collector.
            resource: of the actor, see :func:`~penstock.runtime.observability.span_file.actor_attributes`.
            max_queued: batches that wait for it.
        """
        self.num_exported = 0
        """Spans that it has taken."""
        self.num_dropped = 0
        """Spans that did not reach it, because it was slow or refused them."""
        self._resource = Resource(resource)
        self._exporter = exporter
        self._max_queued = max_queued
        self._queue: deque[list[bytes]] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="span-collector", daemon=True)
        self._thread.start()

    def offer(self, spans: list[bytes]) -> None:
        """It is told of them, as the recorder has them, when it is their turn."""
        if len(self._queue) >= self._max_queued:
            self.num_dropped += len(spans)
            return
        self._queue.append(spans)
        self._wake.set()

    def close(self, deadline: float) -> bool:
        """Tell what is left until then (on the monotonic clock); whether all was told in time."""
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
                told = [readable_span(each, self._resource) for span in spans for each in unpacked(decoded_span(span))]
                if self._exporter.export(told) is SpanExportResult.SUCCESS:
                    self.num_exported += len(spans)
                else:
                    self.num_dropped += len(spans)
            if self._is_closing and not self._queue:
                return


def _context(trace_id: int, span_id: bytes) -> SpanContext:
    return SpanContext(trace_id, int.from_bytes(span_id, "big"), is_remote=False, trace_flags=_SAMPLED)
