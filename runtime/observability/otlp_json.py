"""Spans as OTLP/JSON, each line one ``TracesData`` object: what ``penstock trace --otlp`` writes, and what the files of
runs were before they held tuples.

As the OpenTelemetry Protocol's file exporter has it, ids are in hex and 64-bit integers strings, so that a collector's
OTLP JSON file receiver reads it as it stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.observability.gen_ai import conventional, has_convention

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.runtime.observability.span_file import SpanLine
    from penstock.runtime.observability.spans import AttributeValue, SpanTuple

SCOPE_NAME: Final = "penstock"
OTLP_START: Final = b'{"resourceSpans":'
"""Of a line; one of tuples begins otherwise."""
_INTERNAL: Final = 1


class AnyValue(msgspec.Struct, rename="camel", omit_defaults=True):
    """As far as spans of Penstock use it."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: str | None = None
    double_value: float | None = None

    def plain(self) -> AttributeValue:
        if self.bool_value is not None:
            return self.bool_value
        if self.int_value is not None:
            return int(self.int_value)
        if self.double_value is not None:
            return self.double_value
        return "" if self.string_value is None else self.string_value


class Attribute(msgspec.Struct):
    key: str
    value: AnyValue


class Scope(msgspec.Struct, frozen=True):
    name: str = ""


class LinkedSpan(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str


class OtlpSpan(msgspec.Struct, rename="camel", omit_defaults=True):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: str
    end_time_unix_nano: str
    parent_span_id: str = ""
    kind: int = 0
    attributes: list[Attribute] = []
    links: list[LinkedSpan] = []


class ScopeSpans(msgspec.Struct):
    spans: list[OtlpSpan]
    scope: Scope = Scope()


class OtlpResource(msgspec.Struct):
    attributes: list[Attribute]


class ResourceSpans(msgspec.Struct, rename="camel"):
    resource: OtlpResource
    scope_spans: list[ScopeSpans]


class TracesData(msgspec.Struct, rename="camel"):
    resource_spans: list[ResourceSpans]


def all_attributes(span: SpanTuple) -> list[tuple[str, AttributeValue]]:
    """Those of the span, and what the conventions call them."""
    name, attributes = span[3], span[6]
    if not attributes or not has_convention(name):
        return list(attributes)
    return [*attributes, *conventional(name, dict(attributes)).items()]


def otlp_line(line: SpanLine) -> bytes:
    """The same spans, without a line end."""
    spans = ScopeSpans(scope=Scope(SCOPE_NAME), spans=list(map(_otlp_span, line.spans)))
    resource = OtlpResource(_attributes(line.resource.items()))
    return msgspec.json.encode(TracesData([ResourceSpans(resource, [spans])]))


def _otlp_span(span: SpanTuple) -> OtlpSpan:
    trace_id, span_id, parent_id, name, start_ns, end_ns, _, links = span
    return OtlpSpan(
        trace_id=trace_id.hex(),
        span_id=span_id.hex(),
        parent_span_id=parent_id.hex(),
        name=name,
        kind=_INTERNAL,
        start_time_unix_nano=str(start_ns),
        end_time_unix_nano=str(end_ns),
        attributes=_attributes(all_attributes(span)),
        links=[LinkedSpan(trace.hex(), linked.hex()) for trace, linked in links],
    )


def _attributes(attributes: Iterable[tuple[str, AttributeValue]]) -> list[Attribute]:
    return [Attribute(key, _any_value(value)) for key, value in attributes]


def _any_value(value: AttributeValue) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=str(value))
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)
