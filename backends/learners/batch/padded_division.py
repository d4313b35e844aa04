"""The micro-batches of one optimizer step where each sequence has a row that is padded to the longest beside it.

Invariants: as of :mod:`.packing`; and a micro-batch of several rows has at most the bound of places, padding counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.batch.packing import Division

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.learners.batch.packing import MicroBatch
    from penstock.backends.learners.batch.sequences import TrainSequence


def divide_padded(sequences: Sequence[TrainSequence], *, num_ranks: int, max_tokens: int) -> Division:
    """Few rounds of micro-batches, rows of like length together, so that little is padded, all about equally full.

    Args:
        sequences: at least one.
        num_ranks: at least 1.
        max_tokens: places of a micro-batch; a sequence that is longer is alone in its own.
    """
    ordered = sorted(sequences, key=lambda sequence: -len(sequence.tokens))
    fewest = len(_cut(ordered, max_tokens))
    num_rounds = -(-fewest // num_ranks)
    low, high = 1, max_tokens
    while low < high:  # the smallest bound that takes no more rounds
        middle = (low + high) // 2
        if len(_cut(ordered, middle)) <= num_rounds * num_ranks:
            high = middle
        else:
            low = middle + 1
    parts = _cut(ordered, low)
    parts += [[] for _ in range(num_rounds * num_ranks - len(parts))]
    return Division([parts[rank::num_ranks] for rank in range(num_ranks)])


def _cut(ordered: Sequence[TrainSequence], max_tokens: int) -> list[MicroBatch]:
    """Stretches of sequences that come the longest first."""
    parts: list[MicroBatch] = []
    longest = 0
    for sequence in ordered:
        if not parts or (len(parts[-1]) + 1) * longest > max_tokens:
            parts.append([])
            longest = len(sequence.tokens) - 1
        parts[-1].append(sequence)
    return parts
