"""What is trained in the tests of the step: the same batches for transformers and for every layout."""

from __future__ import annotations

import numpy as np

from penstock.backends.learners.batch.sequences import TrainSequence, demonstration_sequence

NUM_STEPS = 3
NUM_MICRO_BATCHES = 4
LENGTHS = ([17, 9], [21], [6, 12, 5], [26])
"""Of the sequences of each micro-batch."""
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 0.5
BETAS = (0.9, 0.999)
EPSILON = 1e-5
"""Of AdamW: large, since with the usual one a gradient that is zero but for rounding makes a step of full size."""
ENTROPY_COEF = 0.02
TEMPERATURE = 0.9


def micro_batches(step: int, vocab_size: int) -> list[list[TrainSequence]]:
    """All of a step; about two thirds of the tokens are trained."""
    drawn = np.random.default_rng(step)
    batches: list[list[TrainSequence]] = []
    for lengths in LENGTHS:
        batch: list[TrainSequence] = []
        for number, length in enumerate(lengths):
            row = drawn.integers(0, vocab_size, length).tolist()
            sequence = demonstration_sequence(row[:1], row[1:], sample=number)
            kept = sequence.trained[drawn.random(length - 1) < 0.7]
            kept = kept if len(kept) else sequence.trained[:1]
            batch.append(sequence._replace(tokens=sequence.tokens[: kept[-1] + 1], trained=kept))
        batches.append(batch)
    return batches


def num_trained(batches: list[list[TrainSequence]]) -> int:
    return sum(len(sequence.trained) for batch in batches for sequence in batch)
