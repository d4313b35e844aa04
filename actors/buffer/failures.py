"""Why samples failed, counted by cause and kind of reason, and when a run in which all of them fail is to end.

Invariants:

* The counts follow from the ledger's entries alone. A sample counts once: when it is noted, or else when its group
  goes out.
* A run ends for its failures only while no sample of it has ever been scored.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.messages.books import KeptFailures
from penstock.messages.reasons import ReasonCount, reason_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.messages.evaluation import EvaluatedRow
    from penstock.messages.ledger import GroupClosed, GroupRecorded
    from penstock.messages.samples import SampleEnd

MAX_KINDS: Final = 200
"""That are told apart; what else there is counts as ``OTHER``."""
MAX_TOLD: Final = 20
OTHER: Final = "other reasons"
OF_MANY_KINDS: Final = 4
"""So many times as many failures of any kinds end a run as of one kind would."""


class Failures:
    """Of the whole run, as a fold of the ledger."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.has_scored = False
        """Some sample of the run has had its reward, or needed none."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """By cause and kind."""
        self._examples: dict[tuple[str, str], str] = {}
        self._open: dict[int, set[int]] = {}
        """Indices of samples that are noted, of groups that have not gone out."""

    def news(self, ends: Iterable[SampleEnd]) -> tuple[SampleEnd, ...]:
        """Those that are not noted."""
        return tuple(end for end in ends if end.key.index not in self._open.get(end.key.group_id, ()))

    def noted(self, ends: Iterable[SampleEnd]) -> None:
        """These have failed."""
        for end in self.news(ends):
            self._open.setdefault(end.key.group_id, set()).add(end.key.index)
            self._count(end)

    def admitted(self, entry: GroupRecorded) -> None:
        """A group came in, perhaps without some of its samples."""
        self.has_scored = self.has_scored or bool(entry.samples)
        self._went_out(entry.group_id, entry.ended)

    def closed(self, entry: GroupClosed, *, was_admitted: bool) -> None:
        """A group ended otherwise than by training; one that had come in has been counted then."""
        self.has_scored = self.has_scored or entry.mean_reward is not None
        self._went_out(entry.group_id, () if was_admitted else entry.ended)

    def evaluated(self, group_id: int, row: EvaluatedRow) -> None:
        """A group of an evaluation has ended."""
        self.has_scored = self.has_scored or bool(row.samples)
        self._went_out(group_id, row.missing)

    def _went_out(self, group_id: int, ends: Iterable[SampleEnd]) -> None:
        for end in self.news(ends):
            self._count(end)
        self._open.pop(group_id, None)

    def _count(self, end: SampleEnd) -> None:
        if not end.reason:
            return
        key = (end.cause, reason_kind(end.reason))
        if key not in self._counts and len(self._counts) >= MAX_KINDS:
            key = (end.cause, OTHER)
        self.num_samples += 1
        self._counts[key] += 1
        self._examples.setdefault(key, end.reason)

    def counts(self, limit: int = MAX_TOLD) -> tuple[ReasonCount, ...]:
        """The most frequent ones, most frequent first."""
        ranked = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(
            ReasonCount(cause=cause, kind=kind, example=self._examples[cause, kind], num_samples=number)
            for (cause, kind), number in ranked[:limit]
        )

    def kept(self) -> KeptFailures:
        """What a snapshot has of it."""
        return KeptFailures(
            num_samples=self.num_samples,
            has_scored=self.has_scored,
            counts=self.counts(len(self._counts)),
            noted=tuple((group_id, tuple(sorted(indices))) for group_id, indices in self._open.items()),
        )

    def restore(self, kept: KeptFailures) -> None:
        """As it was then."""
        self.num_samples, self.has_scored = kept.num_samples, kept.has_scored
        self._counts = Counter({(each.cause, each.kind): each.num_samples for each in kept.counts})
        self._examples = {(each.cause, each.kind): each.example for each in kept.counts}
        self._open = {group_id: set(indices) for group_id, indices in kept.noted}

    def told(self) -> str:
        """The most frequent reason as a sentence; empty where nothing has failed."""
        first = next(iter(self.counts(1)), None)
        if first is None:
            return ""
        rest = f" of {self.num_samples} failures" if self.num_samples > first.num_samples else ""
        return f"Most frequent reason ({first.num_samples}{rest}, {first.cause}): {first.example}"


class EarlyFailures:
    """Whether every sample fails. Counts what this incarnation of the Buffer hears, so that a run which is resumed with
    a mended function has a fresh start."""

    def __init__(self, limit: int) -> None:
        """``limit``: failures of one kind that end the run, where they are most of all; 0: none do."""
        self._limit = limit
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._is_over = limit == 0
        """Some sample has been scored, or nothing is to end the run."""

    def hear(self, ends: Sequence[SampleEnd], *, has_scored: bool) -> str:
        """These have failed; why the run is to end, or nothing."""
        self._is_over = self._is_over or has_scored
        if self._is_over:
            return ""
        for end in ends:
            kind = reason_kind(end.reason)
            self._kinds[kind] += 1
            self._examples[kind] = end.reason
        total = self._kinds.total()
        kind, most = next(iter(self._kinds.most_common(1)), ("", 0))
        is_one = most >= self._limit and 2 * most > total
        if not is_one and total < self._limit * OF_MANY_KINDS:
            return ""
        each = "all for one reason" if most == total else f"for {len(self._kinds)} reasons, {most} of them for one"
        return (
            f"the first {total} samples of the run all failed, {each}: {self._examples[kind]}. When that is mended, "
            "penstock resume goes on from here (reward.alarms.stop_after)"
        )
