"""Micro-batches of a bounded number of tokens, packed end to end without padding.

Axis letters: ``N`` tokens of a micro-batch, ``T`` trained tokens of it, ``B`` sequences of it.

Invariants:

* Each sequence is in exactly one micro-batch, whole. One that is longer than the bound is alone in its own.
* The last token of a sequence is predicted and predicts nothing, so it is no input and costs nothing.
* Position ids start at 0 in each sequence; that, and the rows of the layout, keep sequences apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.sequences import TrainSequence


class PackedTokens(NamedTuple):
    """One micro-batch."""

    input_ids: NDArray[np.int64]
    """``[N]``"""
    position_ids: NDArray[np.int64]
    """``[N]``"""
    lengths: NDArray[np.int64]
    """Inputs of each sequence ``[B]``; adds up to N."""
    predicted_at: NDArray[np.int64]
    """Places ``[T]`` among the inputs whose next token is trained."""
    targets: NDArray[np.int64]
    """That next token ``[T]``."""
    rollout_logprobs: NDArray[np.float32]
    """``[T]``"""
    sample_of: NDArray[np.int64]
    """Index in the batch of the sample that a trained token belongs to ``[T]``."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of ``lengths`` in as few micro-batches as hold at most ``max_tokens`` each, all about equally full.

    Neighbours in length stay together, since attention pads to the longest of its micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    target = _even_share([lengths[index] for index in order], max_tokens)
    parts: list[list[int]] = []
    room = 0
    for index in order:
        if lengths[index] > room:
            parts.append([])
            room = target
        parts[-1].append(index)
        room -= lengths[index]
    return parts


def pack(sequences: Sequence[TrainSequence]) -> PackedTokens:
    """Lay the inputs of these sequences end to end."""
    lengths = np.asarray([len(sequence.tokens) - 1 for sequence in sequences], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    return PackedTokens(
        input_ids=np.concatenate([sequence.tokens[:-1] for sequence in sequences]).astype(np.int64),
        position_ids=np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths),
        lengths=lengths,
        predicted_at=np.concatenate(
            [sequence.trained - 1 + start for sequence, start in zip(sequences, starts, strict=True)]
        ),
        targets=np.concatenate([sequence.tokens[sequence.trained] for sequence in sequences]).astype(np.int64),
        rollout_logprobs=np.concatenate([sequence.rollout_logprobs for sequence in sequences]),
        sample_of=np.repeat(
            np.asarray([sequence.sample for sequence in sequences], dtype=np.int64),
            [len(sequence.trained) for sequence in sequences],
        ),
    )


def _even_share(descending: Sequence[int], max_tokens: int) -> int:
    """The smallest bound under which the greedy split needs no more micro-batches than under ``max_tokens``."""
    fewest = _count_parts(descending, max_tokens)
    low, high = max(1, sum(descending) // max(fewest, 1)), max_tokens
    while low < high:
        middle = (low + high) // 2
        if _count_parts(descending, middle) <= fewest:
            high = middle
        else:
            low = middle + 1
    return high


def _count_parts(descending: Sequence[int], bound: int) -> int:
    count = room = 0
    for length in descending:
        if length > room:
            count, room = count + 1, bound
        room -= length
    return count
