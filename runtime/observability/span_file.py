"""Spans in the run's folder: the tuples as they were recorded, batch by batch.

Invariants:

* Each line is one :class:`SpanLine`. Building what OTLP wants of a span takes ten times as long as encoding its tuple:
  :mod:`.otlp_json` does that for whoever asks, later.
* Names and texts may be foreign: each was encoded as JSON when it was recorded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from penstock.runtime.observability.jsonl import JsonLinesWriter
from penstock.runtime.observability.spans import AttributeValue, SpanTuple, decoded_span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class SpanLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file: spans of one incarnation of an actor."""

    resource: dict[str, AttributeValue]
    """Whose; see :func:`actor_attributes`."""
    end_ns: int
    """When the first of them ended: who looks for a time passes over the line without decoding it."""
    spans: list[SpanTuple]
    """Ids as base64, times as numbers."""


class _Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """The same, of spans that are encoded already."""

    resource: dict[str, AttributeValue]
    end_ns: int
    spans: msgspec.Raw


def actor_attributes(name: str, epoch: int) -> dict[str, AttributeValue]:
    """What OpenTelemetry calls the resource: one incarnation of an actor."""
    return {
        "service.name": "penstock",
        "service.instance.id": f"{name}#{epoch}",
        "penstock.actor": name,
        "penstock.epoch": epoch,
        "process.pid": os.getpid(),
    }


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
        self._resource = dict(resource)

    def write(self, spans: Sequence[bytes]) -> None:
        """Write a batch as the recorder has it; the line is with the operating system when this returns.

        Raises:
            OSError: it could not be written.
        """
        if spans:
            encoded = msgspec.Raw(b"[" + b",".join(spans) + b"]")
            self._lines.append(_Encoded(resource=self._resource, end_ns=decoded_span(spans[0])[5], spans=encoded))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
