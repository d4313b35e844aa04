"""Which trace a sample, a step, a version or an event belongs to, and whether it is kept."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.messages.flow import GroupAdmitted
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
    KEY_OF,
    SUBJECTS,
    GroupSubject,
    StepSubject,
    Subject,
    VersionSubject,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.messages.base import Event

UNTRACED: Final = b""
"""Stands for the trace of a sample whose group is not among the fraction that is kept."""
CACHED_TRACES: Final = 65_536
"""About 8 MB; a look-up costs a fifth of deriving the id."""
CACHED_VERSIONS: Final = 256
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def _key_of_admitted(event: GroupAdmitted) -> SampleKey:
    samples = event.group.samples
    return samples[0].key if samples else SampleKey(event.group.group_id, 0)


class _Derived(dict[KeyT, ValueT]):
    """What follows from a key, worked out when it is asked for the first time. Looking it up runs no Python; neither
    keys nor values are anything that the garbage collector walks through."""

    def __init__(self, derive: Callable[[KeyT], ValueT]) -> None:
        super().__init__()
        self._derive = derive

    def __missing__(self, key: KeyT) -> ValueT:
        if len(self) >= CACHED_TRACES:
            self.clear()
        value = self[key] = self._derive(key)
        return value


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
        self._kept = kept = _Derived(self._decided)
        self.keeps: Final[Callable[[int], bool]] = kept.__getitem__
        """Whether the samples of this group are traced."""
        self.told: Final[Callable[[int, bool], bool]] = kept.setdefault
        """Likewise; a sender has told us, by the context that it sends or does not send."""
        self.trace_of: Final[Callable[[SampleKey], bytes]] = _Derived(self._derived).__getitem__
        """The trace id (16 bytes) of a sample, traced or not."""
        self.step = lru_cache(maxsize=CACHED_VERSIONS)(self._step)
        """The trace of the step that makes this version."""
        self.version = lru_cache(maxsize=CACHED_VERSIONS)(self._version)
        """The trace of this version's way to the engines."""
        self.key_of: Final[Mapping[type[Event], Callable[[Any], SampleKey]]] = {
            **KEY_OF,
            GroupAdmitted: _key_of_admitted,
        }
        """By class of an event about one sample, or about a group: the sample in whose trace it stands. Such an event
        comes without the context of a trace where its sender has left the group out."""
        self.of_event: Final[Mapping[type[Event], Callable[[Any], bytes]]] = {
            kind: self._by_subject(find) for kind, find in SUBJECTS.items() if kind not in self.key_of
        }
        """By class of an event about anything else: its trace, as :meth:`of` has it. An event of neither is about
        nothing in particular."""

    def sample(self, key: SampleKey) -> bytes:
        """The sample's trace id (16 bytes), or ``UNTRACED``."""
        return self.trace_of(key) if self.keeps(key.group_id) else UNTRACED

    def trim(self) -> None:
        """Forget, now and then, what was told, so that it does not grow."""
        if len(self._kept) >= CACHED_TRACES:
            self._kept.clear()

    def _decided(self, group_id: int) -> bool:
        return self._derived(SampleKey(group_id, 0))[8:] < self._left_out_from  # as `is_traced`

    def _derived(self, key: SampleKey) -> bytes:
        """As ``trace_id_of``, from a state that has taken the salt already."""
        hashed = self._keyed.copy()
        hashed.update(b"sample/%d/%d" % (key.group_id, key.index))
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
            case SampleKey():
                return self.sample(subject)
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

    def _by_subject(self, find: Callable[[Any], Subject]) -> Callable[[Any], bytes]:
        return lambda event: self.of(find(event))


def _left_out_from(fraction: float) -> bytes:
    """The second half of the first trace id that is not sampled, to be compared as bytes are; where all are, it is
    longer than any."""
    return sampled_below(fraction).to_bytes(8, "big") if fraction < 1 else b"\xff" * 9
