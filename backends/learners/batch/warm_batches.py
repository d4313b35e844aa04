"""Which demonstrations each supervised step before version 0 sees, and at which learning rate.

Invariants:

* Both are functions of the seed: passes over a shuffled list, the last batch of a pass filled from the next one.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.learners.learning_rate import learning_rate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.options import WarmStartOptions


class WarmStep(NamedTuple):
    """One supervised step."""

    sequences: list[TrainSequence]
    learning_rate: float
    name: str
    """Name of the step in messages."""
    fraction: float
    """Of the warm start that is done after it."""

    @property
    def num_tokens(self) -> int:
        """That are imitated."""
        return sum(len(sequence.trained) for sequence in self.sequences)


def warm_steps(demonstrations: Sequence[TrainSequence], block: WarmStartOptions, *, seed: int) -> Iterator[WarmStep]:
    """All of them.

    Args:
        demonstrations: at least one.
        block: the ``warm_start:`` block.
        seed: of the order of the demonstrations.
    """
    stream = _endless(demonstrations, seed)
    for step in range(block.num_steps):
        rate = learning_rate(
            step,
            peak=block.learning_rate,
            warmup_steps=block.warmup_steps,
            num_steps=block.num_steps,
            schedule="linear",
        )
        sequences = list(islice(stream, block.batch_size))
        yield WarmStep(sequences, rate, f"warm-start step {step + 1}", (step + 1) / block.num_steps)


def _endless(demonstrations: Sequence[TrainSequence], seed: int) -> Iterator[TrainSequence]:
    draw = random.Random(f"warm start {seed}")
    order = list(range(len(demonstrations)))
    while True:
        draw.shuffle(order)
        for index in order:
            yield demonstrations[index]
