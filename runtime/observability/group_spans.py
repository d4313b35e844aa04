"""Spans that are the same for several samples of a group: recorded once for all of them, and told apart by who reads.

Invariants:

* What an actor pays for ``filter``, ``buffer_wait`` and ``train`` is a record for each group. Whoever reads it, from a
  file or for a collector, gets a span for each sample from :func:`unpacked`, and never sees the record.
* The record is a span of the group's sample 0, in the group or not. The trace of another one follows from its trace, as
  :func:`.spans.sample_trace_id` has it, the id of its span from its span's, and the parent is the root of that trace.
* The last attribute of a record, ``SAMPLES``, names the samples by their index: ``0 1 3+1200``. What stands behind a
  ``+`` is by how many nanoseconds the span of this sample begins later than the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.observability.spans import next_span_id, root_span_id, sample_trace_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.observability.spans import Attributes, SpanLink, SpanRecorder, SpanTuple

SAMPLES: Final = "penstock.samples"


def record_together(
    recorder: SpanRecorder,
    first_trace_id: bytes,
    name: str,
    starts_ns: Sequence[tuple[int, int]],
    end_ns: int,
    attributes: Attributes,
    links: tuple[SpanLink, ...] = (),
) -> None:
    """Record a span for each of several samples of a group, below the root of its trace; of none of them nothing.

    Args:
        recorder: where it goes.
        first_trace_id: of the group's sample 0.
        name: of all spans.
        starts_ns: index and start in Unix nanoseconds of each sample.
        end_ns: of all spans.
        attributes: likewise.
        links: likewise.
    """
    if not starts_ns:
        return
    start_ns = min([since_ns for _, since_ns in starts_ns])
    texts = [f"{index}+{since_ns - start_ns}" if since_ns > start_ns else str(index) for index, since_ns in starts_ns]
    told = (*attributes, (SAMPLES, " ".join(texts)))
    recorder.record(first_trace_id, root_span_id(first_trace_id), name, start_ns, end_ns, told, links)


def unpacked(span: SpanTuple) -> list[SpanTuple]:
    """The span of each sample where it is a record of several, else the span itself.

    Raises:
        ValueError: it names samples in another way.
    """
    first_trace_id, first_id, _, name, start_ns, end_ns, attributes, links = span
    if not attributes or attributes[-1][0] != SAMPLES:
        return [span]
    spans: list[SpanTuple] = []
    for text in str(attributes[-1][1]).split(" "):
        index, _, later_ns = text.partition("+")
        trace_id, span_id = sample_trace_id(first_trace_id, int(index)), next_span_id(first_id, int(index))
        since_ns = start_ns + int(later_ns or 0)
        spans.append((trace_id, span_id, root_span_id(trace_id), name, since_ns, end_ns, attributes[:-1], links))
    return spans
