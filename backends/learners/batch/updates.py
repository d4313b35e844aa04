"""A batch divided into optimizer steps.

Invariants:

* Each sample is in exactly one update, whole. Where the estimator compares the samples of a group, so is each group.
* Two updates of a batch differ by at most the trained tokens of the largest group (or sample), and by at most one group
  (or sample).
* The division is a function of the batch and of the given random numbers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence


class Update(NamedTuple):
    """What one optimizer step is made from."""

    sequences: tuple[TrainSequence, ...]
    """``sample`` counts within the update, ``first`` within the batch."""
    num_samples: int
    """Samples of the update, with those that have no trained token."""
    batch_samples: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    """Of each of them, its number in the batch."""

    @property
    def num_tokens(self) -> int:
        """That are trained."""
        return sum(len(sequence.trained) for sequence in self.sequences)

    def tokens_per_sample(self) -> NDArray[np.float32]:
        """Trained tokens of each sample ``[S]``."""
        counts = np.zeros(self.num_samples, dtype=np.float32)
        for sequence in self.sequences:
            counts[sequence.sample] += len(sequence.trained)
        return counts


def whole_batch(batch: TrainBatch) -> Update:
    """The batch as one update."""
    return Update(batch.sequences, len(batch.rewards), np.arange(len(batch.rewards)))


def divide_batch(batch: TrainBatch, num_updates: int, *, by_sample: bool, draw: random.Random) -> list[Update]:
    """Updates in the order in which they are made, without those that would have no trained token: a batch of fewer
    groups than ``num_updates`` makes fewer.

    Args:
        batch: with at least one trained token.
        num_updates: at most that many.
        by_sample: whether a group may be divided.
        draw: decides which groups (or samples) come together, and when.
    """
    if num_updates == 1:
        return [whole_batch(batch)]
    keys = np.arange(len(batch.rewards)) if by_sample else batch.group_ids
    found = np.unique(keys, return_inverse=True)[1]
    sizes = np.bincount(found, weights=batch.tokens_per_sample())
    update_of = np.asarray(_spread([int(size) for size in sizes], num_updates, draw))[found]
    updates = (_update_of(batch, np.flatnonzero(update_of == index)) for index in range(num_updates))
    return [update for update in updates if update.sequences]


def _spread(sizes: Sequence[int], num_updates: int, draw: random.Random) -> list[int]:
    """The update of each unit: the units in falling order of size are dealt out, one to each update, in an order drawn
    anew for every round; the last ones, too few for a round, to the updates with the fewest tokens."""
    order = list(range(len(sizes)))
    draw.shuffle(order)  # decides between units of one size
    order.sort(key=lambda unit: -sizes[unit])
    update_of = [0] * len(sizes)
    loads = [0] * num_updates
    for start in range(0, len(order), num_updates):
        dealt = order[start : start + num_updates]
        seats = draw.sample(range(num_updates), num_updates)
        if len(dealt) < num_updates:
            seats.sort(key=lambda update: loads[update])
        for unit, update in zip(dealt, seats, strict=False):
            update_of[unit] = update
            loads[update] += sizes[unit]
    return update_of


def _update_of(batch: TrainBatch, samples: NDArray[np.int64]) -> Update:
    number = {int(sample): index for index, sample in enumerate(samples)}
    sequences = (sequence for sequence in batch.sequences if sequence.sample in number)
    return Update(tuple(s._replace(sample=number[s.sample]) for s in sequences), len(samples), samples)
