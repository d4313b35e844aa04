"""Spans as lines of JSON: what the hot path of an actor pays for being traced.

Invariants:

* Recording encodes a tuple, which msgspec does in C, appends the bytes to a list, and touches neither OpenTelemetry nor
  a file. So what is kept until a thread of :mod:`penstock.runtime.observability.span_export` takes it is one object a
  span: trees of tuples that live for half a second cost an actor more, in memory that no cache holds, than encoding.
* The trace id of a sample, of a step and of a version is a function of the run's salt and of what it is about. So
  every actor knows it without being told, and the spans of one sample form one trace.
* The id of the root span of a trace is a function of the trace id, so anyone can name it as parent before, or
  without, having seen it.
* Every other span id is unique: a counter that starts at a random point of the lower half of 64 bits in each process.
  What :mod:`.group_spans` records of several samples at once takes one of these, from which theirs follow.
* The list is bounded. What does not fit is dropped and counted, never waited for.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

SALT_BYTES: Final = 16
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
MAX_PENDING_SPANS: Final = 200_000
"""About 50 MB: minutes of a busy actor whose exporter stands still."""

AttributeValue = str | int | float | bool
Attributes = tuple[tuple[str, AttributeValue], ...]
SpanLink = tuple[bytes, bytes]
"""Trace id and span id of another span."""
SpanTuple = tuple[bytes, bytes, bytes, str, int, int, Attributes, tuple[SpanLink, ...]]
"""Trace id (16 bytes), span id (8), parent (8, or empty for a root), name, start and end in Unix nanoseconds,
attributes, links."""

NO_PARENT: Final = b""
CHAT: Final = "chat"
COMPLETION: Final = "text_completion"
TOOL: Final = "execute_tool "
"""With the tool's name. These three are turns and calls of episodes, as OpenTelemetry's conventions call them."""
_RING: Final = (1 << 64) - 1
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples fill the ring evenly (Knuth, The Art of Computer Programming 3, 6.4)."""
_encode: Final = msgspec.json.Encoder().encode
_decode: Final[Callable[[bytes], SpanTuple]] = msgspec.json.Decoder(SpanTuple).decode
_span_id: Final = struct.Struct(">Q").pack
_id: Final = struct.Struct(">QQ").pack
_halves: Final[Callable[[bytes], tuple[int, int]]] = struct.Struct(">QQ").unpack


def decoded_span(data: bytes) -> SpanTuple:
    """What was recorded.

    Raises:
        msgspec.DecodeError: it is no span.
    """
    return _decode(data)


def new_salt() -> bytes:
    """The salt of a run: 16 random bytes from the operating system."""
    return os.urandom(SALT_BYTES)


def trace_id_of(run_salt: bytes, group_id: int, index: int) -> bytes:
    """The trace of one sample, 16 bytes; the same in every process that knows the salt.

    No two samples of a run have the same, and those of two runs only if half of their salts are alike. The second half
    is the group's, so that whoever samples by it, as OpenTelemetry does, keeps all samples of a group or none.
    """
    first, second = _halves(run_salt)
    return _id((first + index * _SPREAD) & _RING, (second + group_id * _SPREAD) & _RING)


def sample_trace_id(first_trace_id: bytes, index: int) -> bytes:
    """The trace of the sample with this index in the group of whose sample 0 the trace is given, 16 bytes."""
    first, second = _halves(first_trace_id)
    return _id((first + index * _SPREAD) & _RING, second)


def next_span_id(span_id: bytes, index: int) -> bytes:
    """Of spans that are recorded together, the id of that of the sample with this index, 8 bytes."""
    return _span_id((int.from_bytes(span_id, "big") + index * _SPREAD) & _RING)


def step_trace_id(run_salt: bytes, version: int) -> bytes:
    """The trace of the step that makes ``version``, 16 bytes."""
    return blake2b(b"step/%d" % version, digest_size=TRACE_ID_BYTES, key=run_salt).digest()


def version_trace_id(run_salt: bytes, version: int) -> bytes:
    """The trace of the way of ``version`` from the learner to the engines, 16 bytes."""
    return blake2b(b"version/%d" % version, digest_size=TRACE_ID_BYTES, key=run_salt).digest()


def root_span_id(trace_id: bytes) -> bytes:
    """The id that the root span of this trace has, 8 bytes."""
    return trace_id[:SPAN_ID_BYTES]


def attempt_span_id(trace_id: bytes, attempt: int) -> bytes:
    """The id of the ``issue`` span of an attempt of a sample, 8 bytes: of the first one the root's."""
    if not attempt:
        return trace_id[:SPAN_ID_BYTES]
    return blake2b(b"attempt/%d" % attempt, digest_size=SPAN_ID_BYTES, key=trace_id).digest()


def is_episode_step(name: str) -> bool:
    """Whether a span of this name is a turn of an episode or a call that it made."""
    return name in (CHAT, COMPLETION) or name.startswith(TOOL)


def is_traced(run_salt: bytes, group_id: int, fraction: float) -> bool:
    """Whether the samples of a group are traced, all of them or none.

    It is the rule of OpenTelemetry's ``TraceIdRatioBased`` sampler: the second half of the trace id is below
    ``fraction`` of all. As it is a multiple of the golden ratio, groups that follow each other are spread evenly: of
    any hundred of them about ``fraction`` are kept.
    """
    return traced_among(run_salt, range(group_id, group_id + 1), fraction)[0]


def traced_among(run_salt: bytes, groups: range, fraction: float) -> list[bool]:
    """:func:`is_traced` of each of these groups."""
    half, limit = _halves(run_salt)[1], round(fraction * (_RING + 1))
    return [(half + group_id * _SPREAD) & _RING < limit for group_id in groups]


class SpanRecorder:
    """Collects the spans of one process until an exporter takes them. Any thread may record."""

    __slots__ = ("_limit", "_next_id", "_spans", "has_news", "num_dropped")

    def __init__(self, *, max_pending: int = MAX_PENDING_SPANS) -> None:
        self.num_dropped = 0
        """Spans that found the list full, or that no file can hold."""
        self.has_news = threading.Event()
        """Set to have them taken soon, and not when it is time."""
        self._limit = max_pending
        self._spans: list[bytes] = []
        start = int.from_bytes(os.urandom(SPAN_ID_BYTES), "big") >> 1
        self._next_id: Callable[[], int] = itertools.count(start).__next__

    def record(
        self,
        trace_id: bytes,
        parent_id: bytes,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes = (),
        links: tuple[SpanLink, ...] = (),
        *,
        span_id: bytes = b"",
    ) -> bytes:
        """Record a finished span; returns its id (8 bytes), a new one unless one is given."""
        span_id = span_id or _span_id(self._next_id())
        spans = self._spans
        if len(spans) < self._limit:
            try:
                spans.append(_encode((trace_id, span_id, parent_id, name, start_ns, end_ns, attributes, links)))
            except UnicodeEncodeError:  # foreign text, such as the id of a model's call, with half a character
                self.num_dropped += 1
        else:
            self.num_dropped += 1
        return span_id

    def record_root(
        self,
        trace_id: bytes,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes = (),
        links: tuple[SpanLink, ...] = (),
    ) -> bytes:
        """Record the root of a trace, under the id that :func:`root_span_id` gives it."""
        span_id = root_span_id(trace_id)
        return self.record(trace_id, NO_PARENT, name, start_ns, end_ns, attributes, links, span_id=span_id)

    def new_id(self) -> bytes:
        """The id of a span that is recorded later, 8 bytes; what happens within it is recorded before."""
        return _span_id(self._next_id())

    @property
    def num_pending(self) -> int:
        """Spans that were recorded and not taken yet."""
        return len(self._spans)

    def take(self, limit: int) -> list[bytes]:
        """Remove and return at most ``limit`` of the oldest spans, see :func:`decoded_span`. For one exporter at a
        time."""
        spans = self._spans
        # Two operations, each atomic under the interpreter's lock: what another thread appends between them stands
        # behind what is cut off. Replacing the list instead would lose an append that had already looked it up.
        taken = spans[:limit]
        del spans[: len(taken)]
        return taken
