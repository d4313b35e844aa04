"""Which trace a sample, a step, a version or an event belongs to, and whether it is kept."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from penstock.runtime.observability.spans import (
    TRACE_ID_BYTES,
    SpanLink,
    root_span_id,
    sampled_below,
    step_trace_id,
    version_trace_id,
)
from penstock.runtime.observability.subjects import (
    SUBJECTS,
    GroupSubject,
    SampleSubject,
    StepSubject,
    Subject,
    VersionSubject,
    of_admitted,
    of_key,
    of_sample,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event
    from penstock.messages.flow import GroupAdmitted

UNTRACED: Final = b""
"""Stands for the trace of a sample that is not among the fraction that is kept."""
CACHED_TRACES: Final = 65_536
"""About 8 MB; a look-up costs a fifth of deriving the id."""
_INDEX_BITS: Final = 32
CACHED_VERSIONS: Final = 256


class TraceIds:
    """The trace ids of one run, as any of its processes derives them."""

    def __init__(self, run_salt: bytes, fraction: float) -> None:
        """
        Args:
            run_salt: 16 bytes, the same in all processes of the run.
            fraction: share of the samples that is traced, in [0, 1]. Steps and versions always are.
        """
        self._salt = run_salt
        self._limit = sampled_below(fraction)
        self._keyed = blake2b(digest_size=TRACE_ID_BYTES, key=run_salt)
        self._known: dict[int, bytes] = {}
        """By group and index in one whole number: neither key nor value is anything that the garbage collector walks
        through, as the entries of an `lru_cache` are."""
        self.step = lru_cache(maxsize=CACHED_VERSIONS)(self._step)
        """The trace of the step that makes this version."""
        self.version = lru_cache(maxsize=CACHED_VERSIONS)(self._version)
        """The trace of this version's way to the engines."""
        quick: dict[object, Callable[[Any], bytes]] = {
            of_key: self._of_key,
            of_sample: self._of_sample,
            of_admitted: self._of_admitted,
        }
        self._of_event: dict[type[Event], Callable[[Any], bytes]] = {
            kind: quick.get(find) or self._by_subject(find) for kind, find in SUBJECTS.items()
        }
        note: dict[object, Callable[[Any], object]] = {of_key: self._leave_out_key, of_sample: self._leave_out_sample}
        self._left_out: dict[type[Event], Callable[[Any], object]] = {
            kind: note.get(find, _nothing) for kind, find in SUBJECTS.items() if find in (*note, of_admitted)
        }

    def sample(self, group_id: int, index: int) -> bytes:
        """The sample's trace id (16 bytes), or ``UNTRACED``."""
        number = group_id << _INDEX_BITS | index
        trace_id = self._known.get(number)
        if trace_id is None:
            # As `trace_id_of`, from a state that has taken the salt already.
            hashed = self._keyed.copy()
            hashed.update(b"sample/%d/%d" % (group_id, index))
            trace_id = hashed.digest()
            if int.from_bytes(trace_id[8:], "big") >= self._limit:
                trace_id = UNTRACED
            self._note(number, trace_id)
        return trace_id

    def step_link(self, version: int) -> SpanLink:
        """A link to the root span of a step."""
        trace_id = self.step(version)
        return trace_id, root_span_id(trace_id)

    def version_link(self, version: int) -> SpanLink:
        """A link to the root span of a version."""
        trace_id = self.version(version)
        return trace_id, root_span_id(trace_id)

    def of_event(self, event: Event) -> bytes | None:
        """The trace of what an event is about, as :meth:`of` has it; None where that is nothing in particular."""
        find = self._of_event.get(type(event))
        return None if find is None else find(event)

    def without_context(self, event: Event) -> bytes | None:
        """As :meth:`of_event`, of an event that came without the context of a trace: its sender, who is watched like
        this actor, has left the sample out. It is noted, so that it need not be found out here."""
        note = self._left_out.get(type(event))
        if note is None:
            return self.of_event(event)
        note(event)
        return UNTRACED

    def of(self, subject: Subject) -> bytes:
        """The trace of a subject, or ``UNTRACED``. A group, whose events concern many samples, has the trace of the
        first of its samples that is kept."""
        match subject:
            case SampleSubject():
                return self.sample(subject.group_id, subject.index)
            case GroupSubject():
                traces = (self.sample(subject.group_id, index) for index in subject.indices)
                return next(filter(None, traces), UNTRACED)
            case StepSubject():
                return self.step(subject.version)
            case VersionSubject():
                return self.version(subject.version)

    def _note(self, number: int, trace_id: bytes) -> None:
        if len(self._known) >= CACHED_TRACES:
            self._known.clear()
        self._known[number] = trace_id

    def _leave_out_key(self, event: Any) -> None:  # noqa: ANN401 - the kinds of events that `of_key` takes
        key = event.key
        self._note(key.group_id << _INDEX_BITS | key.index, UNTRACED)

    def _leave_out_sample(self, event: Any) -> None:  # noqa: ANN401 - likewise of `of_sample`
        key = event.sample.key
        self._note(key.group_id << _INDEX_BITS | key.index, UNTRACED)

    def _step(self, version: int) -> bytes:
        return step_trace_id(self._salt, version)

    def _version(self, version: int) -> bytes:
        return version_trace_id(self._salt, version)

    # What nearly all events of a run are about, without a subject in between: a third of what a look costs.

    def _of_key(self, event: Any) -> bytes:  # noqa: ANN401 - the kinds of events that `of_key` takes
        key = event.key
        return self.sample(key.group_id, key.index)

    def _of_sample(self, event: Any) -> bytes:  # noqa: ANN401 - likewise of `of_sample`
        key = event.sample.key
        return self.sample(key.group_id, key.index)

    def _of_admitted(self, event: GroupAdmitted) -> bytes:
        for sample in event.group.samples:
            if trace_id := self.sample(sample.key.group_id, sample.key.index):
                return trace_id
        return UNTRACED

    def _by_subject(self, find: Callable[..., Subject]) -> Callable[[Any], bytes]:
        return lambda event: self.of(find(event))


def _nothing(event: Event) -> None:
    """Of a group nothing is noted: its samples are looked up by nobody who hears of it as a whole."""
