"""Which trace a sample, a step, a version or an event belongs to, and whether it is kept."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from penstock.messages.samples import SampleKey
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
    from collections.abc import Callable, Mapping

    from penstock.messages.base import Event
    from penstock.messages.flow import GroupAdmitted

UNTRACED: Final = b""
"""Stands for the trace of a sample whose group is not among the fraction that is kept."""
CACHED_TRACES: Final = 65_536
"""About 8 MB; a look-up costs a fifth of deriving the id."""
CACHED_VERSIONS: Final = 256


class TraceIds:
    """The trace ids of one run, as any of its processes derives them. All samples of a group are kept, or none."""

    def __init__(self, run_salt: bytes, fraction: float) -> None:
        """
        Args:
            run_salt: 16 bytes, the same in all processes of the run.
            fraction: share of the groups that are traced, in [0, 1]. Steps and versions always are.
        """
        self._salt = run_salt
        self._left_out_from = _left_out_from(fraction)
        self._keyed = blake2b(digest_size=TRACE_ID_BYTES, key=run_salt)
        # Neither keys nor values of the two are anything that the garbage collector walks through.
        self._kept: dict[int, bool] = {}
        self._known: dict[SampleKey, bytes] = {}
        self.step = lru_cache(maxsize=CACHED_VERSIONS)(self._step)
        """The trace of the step that makes this version."""
        self.version = lru_cache(maxsize=CACHED_VERSIONS)(self._version)
        """The trace of this version's way to the engines."""
        quick: dict[object, Callable[[Any], bytes]] = {
            of_key: self._of_key,
            of_sample: self._of_sample,
            of_admitted: self._of_admitted,
        }
        self.of_event: Final[Mapping[type[Event], Callable[[Any], bytes]]] = {
            kind: quick.get(find) or self._by_subject(find) for kind, find in SUBJECTS.items()
        }
        """By class of an event: the trace of what it is about, as :meth:`of` has it. An event of another class is about
        nothing in particular."""
        self.of_samples: Final = frozenset(kind for kind, find in SUBJECTS.items() if find in quick)
        """Classes of events that come without the context of a trace where their sender has left the group out."""

    def keeps(self, group_id: int) -> bool:
        """Whether the samples of this group are traced."""
        is_kept = self._kept.get(group_id)
        return self._decided(group_id) if is_kept is None else is_kept

    def sample(self, key: SampleKey) -> bytes:
        """The sample's trace id (16 bytes), or ``UNTRACED``."""
        is_kept = self._kept.get(key.group_id)
        if is_kept is None:
            is_kept = self._decided(key.group_id)
        if not is_kept:
            return UNTRACED
        trace_id = self._known.get(key)
        if trace_id is None:
            trace_id = self._derived(key.group_id, key.index)
            if len(self._known) >= CACHED_TRACES:
                self._known.clear()
            self._known[key] = trace_id
        return trace_id

    def _decided(self, group_id: int) -> bool:
        is_kept = self._derived(group_id, 0)[8:] < self._left_out_from  # as `is_traced`
        if len(self._kept) >= CACHED_TRACES:
            self._kept.clear()
        self._kept[group_id] = is_kept
        return is_kept

    def _derived(self, group_id: int, index: int) -> bytes:
        """As ``trace_id_of``, from a state that has taken the salt already."""
        hashed = self._keyed.copy()
        hashed.update(b"sample/%d/%d" % (group_id, index))
        return hashed.digest()

    def step_link(self, version: int) -> SpanLink:
        """A link to the root span of a step."""
        trace_id = self.step(version)
        return trace_id, root_span_id(trace_id)

    def version_link(self, version: int) -> SpanLink:
        """A link to the root span of a version."""
        trace_id = self.version(version)
        return trace_id, root_span_id(trace_id)

    def of(self, subject: Subject) -> bytes:
        """The trace of a subject, or ``UNTRACED``. A group, whose events concern many samples, has the trace of the
        first of them."""
        match subject:
            case SampleSubject():
                return self.sample(SampleKey(subject.group_id, subject.index))
            case GroupSubject():
                return self.sample(SampleKey(subject.group_id, subject.indices[0])) if subject.indices else UNTRACED
            case StepSubject():
                return self.step(subject.version)
            case VersionSubject():
                return self.version(subject.version)

    def _step(self, version: int) -> bytes:
        return step_trace_id(self._salt, version)

    def _version(self, version: int) -> bytes:
        return version_trace_id(self._salt, version)

    # What nearly all events of a run are about, without a subject in between: a third of what a look costs.

    def _of_key(self, event: Any) -> bytes:  # noqa: ANN401 - the kinds of events that `of_key` takes
        return self.sample(event.key)

    def _of_sample(self, event: Any) -> bytes:  # noqa: ANN401 - likewise of `of_sample`
        return self.sample(event.sample.key)

    def _of_admitted(self, event: GroupAdmitted) -> bytes:
        samples = event.group.samples
        return self.sample(samples[0].key) if samples else UNTRACED

    def _by_subject(self, find: Callable[..., Subject]) -> Callable[[Any], bytes]:
        return lambda event: self.of(find(event))


def _left_out_from(fraction: float) -> bytes:
    """The second half of the first trace id that is not sampled, to be compared as bytes are; where all are, it is
    longer than any."""
    return sampled_below(fraction).to_bytes(8, "big") if fraction < 1 else b"\xff" * 9
