"""Tokens that an engine's cut-offs left for each draw, for a learner that takes its log-probs over the same ones.

Axis letters: ``T`` trained tokens, ``W`` tokens that were kept for one of them at most.

Invariant: a trained token that has such a set is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.messages.kept_tokens import KeptTokens


class KeptSets(NamedTuple):
    """Of the trained tokens of a sequence."""

    counts: NDArray[np.int64]
    """``[T]``: how many were kept; 0: all of the vocabulary."""
    ids: NDArray[np.int64]
    """Those of the first token, then those of the second, …"""

    def at(self, places: NDArray[np.int64]) -> KeptSets:
        """Those of some of the tokens, which ascend."""
        is_taken = np.zeros(len(self.counts), dtype=np.bool_)
        is_taken[places] = True
        return KeptSets(self.counts[places], self.ids[np.repeat(is_taken, self.counts)])

    def lacks(self, targets: NDArray[np.int32]) -> bool:
        """Whether one of ``targets [T]`` has a set and is not in it."""
        of_token = np.repeat(np.arange(len(targets)), self.counts)
        hits = np.bincount(of_token[self.ids == targets[of_token]], minlength=len(targets))
        return bool(((hits == 0) & (self.counts > 0)).any())


def read_kept(record: KeptTokens, trained: NDArray[np.int64], targets: NDArray[np.int32]) -> KeptSets | None:
    """What was recorded of some tokens of a part; None where it is nothing.

    Args:
        record: of the part.
        trained: places of the trained tokens in it ``[T]``, ascending.
        targets: those tokens ``[T]``.

    Raises:
        ValueError: a trained token is not among those that it was drawn from.
    """
    counts: NDArray[np.uint16] = np.frombuffer(record.counts, dtype="<u2")
    ids: NDArray[np.int32] = np.frombuffer(record.ids, dtype="<i4")
    found = KeptSets(counts.astype(np.int64), ids.astype(np.int64)).at(trained)
    if found.lacks(targets) or (found.ids < 0).any():
        raise ValueError("a trained token is not among those that its engine says it was drawn from")
    return found if len(found.ids) else None


def kept_of(sequences: Sequence[TrainSequence]) -> NDArray[np.int64] | None:
    """``[T, W]`` of all their trained tokens, sequence after sequence: the ids, and −1 behind them; all −1 where there
    is no set. None where no token has one."""
    known = [sequence.kept for sequence in sequences if sequence.kept is not None]
    if not known:
        return None
    counts = np.concatenate(
        [np.zeros(len(s.trained), dtype=np.int64) if s.kept is None else s.kept.counts for s in sequences]
    )
    sets = np.full((len(counts), int(counts.max(initial=1))), -1, dtype=np.int64)
    sets[np.arange(sets.shape[1]) < counts[:, None]] = np.concatenate([kept.ids for kept in known])
    return sets
