"""Spans in the run's folder, as OTLP/JSON.

Invariants:

* The file is as the OpenTelemetry Protocol's file exporter has it: each line one ``TracesData`` object with the spans
  of one actor. A collector's OTLP JSON file receiver reads it as it stands.
* It is written from the tuples, without the OpenTelemetry SDK, which costs a process a tenth of a second to load and
  several times as much for a span.
* Names and texts may be foreign: each is encoded as JSON. Keys of attributes are ours.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.observability.gen_ai import conventional, has_convention
from penstock.runtime.observability.jsonl import JsonLinesWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.spans import AttributeValue, SpanTuple

SCOPE_NAME: Final = "penstock"
CACHED_NAMES: Final = 1024
CACHED_ATTRIBUTES: Final = 4096

_encoder: Final = msgspec.json.Encoder()


def actor_attributes(name: str, epoch: int) -> dict[str, AttributeValue]:
    """What OpenTelemetry calls the resource: one incarnation of an actor."""
    return {
        "service.name": "penstock",
        "service.instance.id": f"{name}#{epoch}",
        "penstock.actor": name,
        "penstock.epoch": epoch,
        "process.pid": os.getpid(),
    }


def all_attributes(span: SpanTuple) -> list[tuple[str, AttributeValue]]:
    """Those of the span, and what the conventions call them."""
    name, attributes = span[3], span[6]
    if not attributes or not has_convention(name):
        return list(attributes)
    return [*attributes, *conventional(name, dict(attributes)).items()]


class SpanFile:
    """Appends each batch as one line. For one thread at a time."""

    def __init__(self, path: Path, resource: Mapping[str, AttributeValue], *, segment_bytes: int = 0) -> None:
        """
        Args:
            path: of the file; continued when it is there.
            resource: of the actor, see :func:`actor_attributes`.
            segment_bytes: from what size on the file is closed and the next one begun; 0: never.
        """
        self._lines = JsonLinesWriter(path, lines_per_write=1, segment_bytes=segment_bytes)
        self._head = (
            f'{{"resourceSpans":[{{"resource":{{"attributes":[{_attributes(resource.items())}]}},'
            f'"scopeSpans":[{{"scope":{{"name":{_text(SCOPE_NAME)}}},"spans":['
        )

    def write(self, spans: Sequence[SpanTuple]) -> None:
        """Write the batch; the line is with the operating system when this returns.

        Raises:
            OSError: it could not be written.
        """
        if spans:
            line = f"{self._head}{','.join(map(_span, spans))}]}}]}}]}}"
            self._lines.append(msgspec.Raw(line.encode()))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _span(span: SpanTuple) -> str:
    """One span: ids in hex, 64-bit integers as strings."""
    trace_id, span_id, parent_id, name, start_ns, end_ns, attributes, links = span
    parent = f'"parentSpanId":"{parent_id.hex()}",' if parent_id else ""
    told = f',"attributes":[{_attributes(all_attributes(span))}]' if attributes else ""
    linked = f',"links":[{",".join(map(_link, links))}]' if links else ""
    return (
        f'{{"traceId":"{trace_id.hex()}","spanId":"{span_id.hex()}",{parent}"name":{_text(name)},"kind":1,'
        f'"startTimeUnixNano":"{start_ns}","endTimeUnixNano":"{end_ns}"{told}{linked}}}'
    )


def _link(link: tuple[bytes, bytes]) -> str:
    return f'{{"traceId":"{link[0].hex()}","spanId":"{link[1].hex()}"}}'


def _attributes(attributes: Iterable[tuple[str, AttributeValue]]) -> str:
    return ",".join([_attribute(key, value) for key, value in attributes])


@lru_cache(maxsize=CACHED_ATTRIBUTES, typed=True)
def _attribute(key: str, value: AttributeValue) -> str:
    """Most of them come again and again: an attempt, an engine, an outcome."""
    return f'{{"key":"{key}","value":{_value(value)}}}'


def _value(value: AttributeValue) -> str:
    if isinstance(value, bool):
        return '{"boolValue":true}' if value else '{"boolValue":false}'
    if isinstance(value, int):
        return f'{{"intValue":"{value}"}}'
    if isinstance(value, float):
        return f'{{"doubleValue":{_encoder.encode(value).decode()}}}'
    return f'{{"stringValue":{_text(value)}}}'


@lru_cache(maxsize=CACHED_NAMES)
def _text(text: str) -> str:
    return _encoder.encode(text).decode()
