"""Which trace a sample, a step, a version or an event belongs to, and whether it is kept."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from penstock.runtime.observability.spans import (
    SpanLink,
    root_span_id,
    sampled,
    step_trace_id,
    trace_id_of,
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
"""About 12 MB; a look-up costs a tenth of deriving the id."""
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
        self._fraction = fraction
        self.sample = lru_cache(maxsize=CACHED_TRACES)(self._sample)
        """``(group_id, index)`` → the sample's trace id (16 bytes), or ``UNTRACED``."""

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

    def _sample(self, group_id: int, index: int) -> bytes:
        trace_id = trace_id_of(self._salt, group_id, index)
        return trace_id if sampled(trace_id, self._fraction) else UNTRACED

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
