"""Which prompts are granted under which group ids, as spans.

Invariants:

* Group ids are issued in order and never reused. Ordinals (places in the stream of prompts) are issued in order too,
  but for those of stale groups, which are granted anew.
* The spans of the snapshot cover every group above the settled floor.
* How often a prompt was granted anew is remembered until it has ended.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain, count, islice
from typing import TYPE_CHECKING

from penstock.messages.books import KeptGrants
from penstock.messages.flow import GrantSpan

if TYPE_CHECKING:
    from collections.abc import Iterator


class Grants:
    """The history of grants, as far as it is still needed."""

    def __init__(self, *, num_prompts: int | None, max_requeues: int) -> None:
        self.total: int = 0
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

    def next_spans(self, number: int, *, min_version: int, deadline_version: int) -> list[GrantSpan]:
        """What to grant next: so many groups, first the prompts that are granted anew. Changes nothing."""
        new: list[GrantSpan] = []
        again = islice(self._again, number)
        fresh = count(self._next_ordinal)
        for group_id, ordinal in zip(range(self.total, self.total + number), chain(again, fresh), strict=False):
            self._append(new, GrantSpan(group_id, 1, ordinal, min_version, deadline_version))
        return new

    def take(self, span: GrantSpan) -> None:
        """These groups are granted, with the ordinals that ``next_spans`` gave them."""
        assert span.first_group == self.total, (span, self.total)
        for _, ordinal in groups_of(span):
            if self._again and self._again[0] == ordinal:
                self._again.popleft()
            else:
                assert ordinal == self._next_ordinal, (span, self._next_ordinal)
                self._next_ordinal += 1
        self.total += span.num_groups
        self._append(self._spans, span)

    def may_requeue(self, ordinal: int) -> bool:
        """Whether this prompt has not been granted again often enough."""
        return self._num_requeued[ordinal] < self._max_requeues

    def requeue(self, ordinal: int) -> None:
        """Grant this prompt again."""
        self._num_requeued[ordinal] += 1
        self._again.append(ordinal)

    def ended(self, ordinal: int) -> None:
        """This prompt will not be granted again."""
        self._num_requeued.pop(ordinal, None)

    def snapshot(self, floor: int) -> tuple[GrantSpan, ...]:
        """The spans that reach above the settled floor; those below are forgotten."""
        while self._spans and self._spans[0].first_group + self._spans[0].num_groups <= floor:
            self._spans.popleft()
        return tuple(self._spans)

    def kept(self, floor: int) -> KeptGrants:
        """What a snapshot has of it, where every group below ``floor`` is settled. Changes nothing."""
        spans = (_above(span, floor) for span in self._spans)
        return KeptGrants(
            total=self.total,
            next_ordinal=self._next_ordinal,
            again=tuple(self._again),
            num_requeued=tuple(sorted(self._num_requeued.items())),
            spans=tuple(span for span in spans if span.num_groups > 0),
        )

    def restore(self, kept: KeptGrants) -> None:
        """As it was then."""
        self.total, self._next_ordinal = kept.total, kept.next_ordinal
        self._again, self._spans = deque(kept.again), deque(kept.spans)
        self._num_requeued = Counter(dict(kept.num_requeued))

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


def _above(span: GrantSpan, floor: int) -> GrantSpan:
    skipped = max(0, floor - span.first_group)
    return GrantSpan(
        span.first_group + skipped, span.num_groups - skipped, span.first_ordinal + skipped, *_versions(span)
    )


def _versions(span: GrantSpan) -> tuple[int, int]:
    return span.min_version, span.deadline_version


def groups_of(span: GrantSpan) -> Iterator[tuple[int, int]]:
    """Group id and ordinal of every group of a span."""
    for offset in range(span.num_groups):
        yield span.first_group + offset, span.first_ordinal + offset
