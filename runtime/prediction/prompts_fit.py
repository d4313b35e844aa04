"""Fits how much of a prompt an engine reads that it has in its cache already, for another sample of the same group.

A modelled engine reads a prompt once, until new weights come. A real one reads the last token again at least, as its
logits are asked; and requests of a group that reach a server within the same pass are read side by side, each whole.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.runtime.prediction.recorded import Recording


class RereadFit(NamedTuple):
    """What came of it."""

    tokens: float
    """Of a prompt that had been read, the mean that was read again."""
    num_requests: int
    """Requests with such a prompt."""


def fit_reread(recordings: Sequence[Recording]) -> RereadFit | None:
    """Over the whole generations of all runs; None where no engine said what it has read, or each read a prompt of its
    own."""
    found = [tokens for recording in recordings for tokens in _reread(recording)]
    return RereadFit(sum(found) / len(found), len(found)) if found else None


def _reread(recording: Recording) -> Iterator[int]:
    swaps: defaultdict[str, list[float]] = defaultdict(list)
    for work in recording.work.get("apply_weights", ()):
        swaps[work.who].append(work.end_s)
    for ends in swaps.values():
        ends.sort()
    seen: set[tuple[str, int, int]] = set()
    for each in sorted(recording.generations, key=lambda generation: generation.start_s):
        sample = each.sample
        if sample is None:
            continue
        prompt = each.engine, sample.group_id, bisect(swaps[each.engine], each.start_s)
        if prompt in seen and each.is_whole and sample.num_read:
            yield sample.num_read - (sample.num_cached or 0)
        seen.add(prompt)
