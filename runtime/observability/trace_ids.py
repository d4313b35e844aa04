"""Which trace a sample, a step or a version belongs to, and whether it is kept."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from penstock.runtime.observability.spans import (
    root_span_id,
    step_trace_id,
    trace_id_of,
    traced_among,
    version_trace_id,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.observability.spans import SpanLink

MAX_DECIDED: Final = 4096
"""Groups of which it is remembered whether they are kept."""
DECIDED_AT_ONCE: Final = 64
"""Groups follow each other, and a row of them costs a third each of what a single one costs."""
CACHED_VERSIONS: Final = 256


class _Decided(dict[int, bool]):
    """Whether a group is kept, worked out with its neighbours when it is asked for the first time. Looking it up runs
    no Python."""

    def __init__(self, run_salt: bytes, fraction: float) -> None:
        super().__init__()
        self._salt, self._fraction = run_salt, fraction

    def __missing__(self, group_id: int) -> bool:
        if len(self) >= MAX_DECIDED:
            self.clear()
        first = group_id & -DECIDED_AT_ONCE
        groups = range(first, first + DECIDED_AT_ONCE)
        self.update(zip(groups, traced_among(self._salt, groups, self._fraction), strict=True))
        return self[group_id]


class TraceIds:
    """The trace ids of one run, as any of its processes derives them. All samples of a group are kept, or none."""

    def __init__(self, run_salt: bytes, fraction: float) -> None:
        """
        Args:
            run_salt: 16 bytes, the same in all processes of the run.
            fraction: share of the groups that are traced, in [0, 1]. Steps and versions always are.
        """
        self.salt: Final = run_salt
        self.kept: Final[Mapping[int, bool]] = _Decided(run_salt, fraction)
        """Whether the samples of a group are traced, by its id; it has an answer for every id."""
        self.step: Final = lru_cache(maxsize=CACHED_VERSIONS)(partial(step_trace_id, run_salt))
        """The trace of the step that makes this version."""
        self.version: Final = lru_cache(maxsize=CACHED_VERSIONS)(partial(version_trace_id, run_salt))
        """The trace of this version's way to the engines."""

    def first_trace(self, group_id: int) -> bytes:
        """The trace id (16 bytes) of the sample with index 0 of a group, from which those of the others follow."""
        return trace_id_of(self.salt, group_id, 0)

    def step_link(self, version: int) -> SpanLink:
        """A link to the root span of a step."""
        trace_id = self.step(version)
        return trace_id, root_span_id(trace_id)

    def version_link(self, version: int) -> SpanLink:
        """A link to the root span of a version."""
        trace_id = self.version(version)
        return trace_id, root_span_id(trace_id)
