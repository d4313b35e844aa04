"""Micro-batches of a bounded number of tokens, packed end to end without padding.

Axis letters: ``N`` input tokens of a micro-batch, ``B`` sequences of it, ``P`` positions of the longest of them,
``T`` its trained tokens.

Invariants:

* Each sequence is in exactly one micro-batch, whole. One that is longer than the bound is alone in its own.
* The last token of a sequence is predicted and predicts nothing, so it is no input and costs nothing.
* Sequences of a micro-batch that have the same context have its tokens among the inputs once. Each sees that context
  and itself and nothing else; :attr:`PackedTokens.rows` says what that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backends.learners.batch.sequences import teacher_top_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainSequence


class PackedTokens(NamedTuple):
    """One micro-batch."""

    input_ids: NDArray[np.int64]
    """``[N]``"""
    position_ids: NDArray[np.int64]
    """Position of each input in its sequence ``[N]``."""
    rows: NDArray[np.int64]
    """Index among the inputs of each position of each sequence ``[B, P]``; 0 past the end of a sequence."""
    places: NDArray[np.int64]
    """Of each input, one place in the flattened rows where it stands ``[N]``."""
    predicted_at: NDArray[np.int64]
    """Index ``[T]`` of the input whose next token is trained."""
    targets: NDArray[np.int64]
    """That next token ``[T]``."""
    rollout_logprobs: NDArray[np.float32]
    """``[T]``"""
    sample_of: NDArray[np.int64]
    """Index in the batch of the sample that a trained token belongs to ``[T]``."""
    lengths: NDArray[np.int64]
    """Positions of each sequence ``[B]``, shared contexts counted."""
    top_ids: NDArray[np.int64] | None = None
    """Tokens whose log-probs are wanted beside the target's ``[T, k]``; None: none are."""


def split_into_micro_batches(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Few micro-batches of at most ``max_tokens`` inputs each, all about equally full.

    Sequences with the same context stay together, so that they can share it, and so do those of like length, since
    attention pads to the longest. Shared contexts count for each sequence, as they do in attention.
    """
    ordered = in_packing_order(sequences)
    lengths = [len(sequence.tokens) - 1 for sequence in ordered]
    bound = _even_share(lengths, max_tokens)
    parts: list[list[TrainSequence]] = []
    room = 0
    for sequence, length in zip(ordered, lengths, strict=True):
        if length > room:
            parts.append([])
            room = bound
        parts[-1].append(sequence)
        room -= length
    return parts


def in_packing_order(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Those with the same context one after the other, the longest first."""
    longest: dict[int, int] = {}
    for sequence in sequences:
        longest[sequence.prompt] = max(longest.get(sequence.prompt, 0), len(sequence.tokens))
    return sorted(sequences, key=lambda s: (-longest[s.prompt], s.prompt, -len(s.tokens)))


def stand_in(sequence: TrainSequence) -> PackedTokens:
    """The smallest micro-batch that a model takes, from the first two tokens of a sequence. What comes of it counts
    for nothing; it is for a rank that has nothing of its own to run while the others do."""
    return pack([tiny_sequence(sequence)])


def tiny_sequence(sequence: TrainSequence) -> TrainSequence:
    """The beginning of a sequence, with one trained token."""
    return sequence._replace(
        tokens=sequence.tokens[:2],
        num_context=1,
        trained=np.ones(1, dtype=np.int64),
        rollout_logprobs=sequence.rollout_logprobs[:1],
        positions=sequence.positions[:1],
        versions=sequence.versions[:1],
        teacher_top=None,
    )


def pack(sequences: Sequence[TrainSequence]) -> PackedTokens:
    """Lay the inputs of these sequences end to end, each context once."""
    num_positions = max(len(sequence.tokens) for sequence in sequences) - 1
    rows = np.zeros((len(sequences), num_positions), dtype=np.int64)
    inputs: list[NDArray[np.int32]] = []
    places: list[NDArray[np.int64]] = []
    context_starts: dict[int, int] = {}
    num_inputs = 0
    for row, sequence in enumerate(sequences):
        length, num_context = len(sequence.tokens) - 1, sequence.num_context
        start = context_starts.setdefault(sequence.prompt, num_inputs)
        first = 0 if start == num_inputs else num_context
        rows[row, :num_context] = np.arange(start, start + num_context)
        rows[row, first:length] = np.arange(num_inputs, num_inputs + length - first)
        inputs.append(sequence.tokens[first:length])
        places.append(np.arange(row * num_positions + first, row * num_positions + length))
        num_inputs += length - first
    top = teacher_top_of(sequences)
    flat_places = np.concatenate(places)
    counts = [len(sequence.trained) for sequence in sequences]
    return PackedTokens(
        input_ids=np.concatenate(inputs).astype(np.int64),
        position_ids=flat_places % num_positions,
        rows=rows,
        places=flat_places,
        predicted_at=np.concatenate([rows[row, sequence.trained - 1] for row, sequence in enumerate(sequences)]),
        targets=np.concatenate([sequence.tokens[sequence.trained] for sequence in sequences]).astype(np.int64),
        rollout_logprobs=np.concatenate([sequence.rollout_logprobs for sequence in sequences]),
        sample_of=np.repeat(np.asarray([sequence.sample for sequence in sequences], dtype=np.int64), counts),
        lengths=np.asarray([len(sequence.tokens) - 1 for sequence in sequences], dtype=np.int64),
        top_ids=None if top is None else top.ids,
    )


def _even_share(lengths: Sequence[int], max_tokens: int) -> int:
    """The smallest bound under which the split needs no more micro-batches than under ``max_tokens``."""
    fewest = _count_parts(lengths, max_tokens)
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if _count_parts(lengths, middle) <= fewest:
            high = middle
        else:
            low = middle + 1
    return high


def _count_parts(lengths: Sequence[int], bound: int) -> int:
    count = room = 0
    for length in lengths:
        if length > room:
            count, room = count + 1, bound
        room -= length
    return count
