"""Which prompts are granted under which group ids, as spans.

Invariants:

* Group ids are issued in order and never reused. Ordinals (places in the stream of prompts) are issued in order too,
  but for those of stale groups, which are granted anew.
* The spans of the snapshot cover every group above the settled floor.
* How often a prompt was granted anew is remembered until it has ended.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from penstock.messages.flow import GrantSpan

if TYPE_CHECKING:
    from collections.abc import Iterator


class Grants:
    """The history of grants, as far as it is still needed."""

    def __init__(self, *, num_prompts: int | None, max_requeues: int) -> None:
        self.total = 0
        self._next_ordinal = 0
        self._num_prompts = num_prompts
        self._max_requeues = max_requeues
        self._again: deque[int] = deque()
        self._num_requeued: Counter[int] = Counter()
        self._spans: deque[GrantSpan] = deque()

    @property
    def num_left(self) -> int | None:
        """Prompts that may still be granted; None when there is no end."""
        if self._num_prompts is None:
            return None
        return self._num_prompts - self._next_ordinal + len(self._again)

    @property
    def num_requeued(self) -> int:
        """Prompts that were granted anew and have not ended."""
        return len(self._num_requeued)

    def grant(self, number: int, *, min_version: int, deadline_version: int) -> list[GrantSpan]:
        """Grant so many groups; the spans are new ones, for the ledger."""
        new: list[GrantSpan] = []
        for _ in range(number):
            ordinal = self._again.popleft() if self._again else self._take_ordinal()
            self._append(new, GrantSpan(self.total, 1, ordinal, min_version, deadline_version))
            self.total += 1
        for span in new:
            self._append(self._spans, span)
        return new

    def requeue(self, ordinal: int) -> bool:
        """Grant this prompt again, unless it has been granted again often enough."""
        if self._num_requeued[ordinal] >= self._max_requeues:
            self.ended(ordinal)
            return False
        self._num_requeued[ordinal] += 1
        self._again.append(ordinal)
        return True

    def ended(self, ordinal: int) -> None:
        """This prompt will not be granted again."""
        self._num_requeued.pop(ordinal, None)

    def snapshot(self, floor: int) -> tuple[GrantSpan, ...]:
        """The spans that reach above the settled floor; those below are forgotten."""
        while self._spans and self._spans[0].first_group + self._spans[0].num_groups <= floor:
            self._spans.popleft()
        return tuple(self._spans)

    def _take_ordinal(self) -> int:
        ordinal, self._next_ordinal = self._next_ordinal, self._next_ordinal + 1
        return ordinal

    def _append(self, spans: list[GrantSpan] | deque[GrantSpan], span: GrantSpan) -> None:
        if spans:
            last = spans[-1]
            follows = last.first_ordinal + last.num_groups == span.first_ordinal
            alike = (last.min_version, last.deadline_version) == (span.min_version, span.deadline_version)
            if follows and alike:
                spans[-1] = GrantSpan(
                    last.first_group, last.num_groups + span.num_groups, last.first_ordinal, *_versions(last)
                )
                return
        spans.append(span)


def _versions(span: GrantSpan) -> tuple[int, int]:
    return span.min_version, span.deadline_version


def groups_of(span: GrantSpan) -> Iterator[tuple[int, int]]:
    """Group id and ordinal of every group of a span."""
    for offset in range(span.num_groups):
        yield span.first_group + offset, span.first_ordinal + offset
