"""Sequences laid end to end as megatron-core's attention takes them, cut for context-parallel ranks.

Axis letters: ``T`` inputs of this rank, ``N`` trained tokens of the whole micro-batch, ``M`` those of them that this
rank predicts.

Invariants:

* A sequence is filled up at its end, where nothing of it sees what it is filled up with.
* With ``c`` context-parallel ranks the length of a sequence is a multiple of ``2 c``; under sequence parallelism what a
  rank has is a multiple of the tensor-parallel ranks.
* Unlike in the torch learner's micro-batches, every sequence has its context among the inputs itself.
* A sequence without a trained token stands in for a micro-batch: it is run, and counts nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backends.learners.batch.kept_sets import kept_of
from penstock.backends.learners.batch.sequences import teacher_top_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainSequence


class PackedShare(NamedTuple):
    """What one context-parallel rank has of a micro-batch."""

    input_ids: NDArray[np.int64]
    """``[T]``"""
    position_ids: NDArray[np.int64]
    """``[T]``"""
    lengths: tuple[int, ...]
    """Lengths of the sequences, whole and padded."""
    predicted_at: NDArray[np.int64]
    """Inputs of this rank whose next token is trained ``[M]``."""
    targets: NDArray[np.int64]
    """Those tokens ``[M]``."""
    places: NDArray[np.int64]
    """Where they stand among the trained tokens of the micro-batch ``[M]``."""
    num_trained: int
    """``N``"""
    own: NDArray[np.int64]
    """Which of the inputs of all ranks, each sequence filled up, those of this rank are ``[T]``."""
    sequence_of: NDArray[np.int64]
    """Of which sequence each input is, −1 where it counts nowhere ``[T]``."""
    top_ids: NDArray[np.int64] | None
    """Tokens whose log-probs are wanted beside the target's ``[M, k]``; None: none are."""
    kept_ids: NDArray[np.int64] | None
    """Tokens that the log-prob of each target is taken over ``[M, W]``; see
    :class:`~penstock.backends.learners.batch.packing.PackedTokens`."""


class FurtherShare(NamedTuple):
    """What one rank has of a micro-batch for a layer that predicts a further token."""

    input_ids: NDArray[np.int64]
    """Tokens further on than the inputs; 0 where there is none ``[T]``."""
    predicted_at: NDArray[np.int64]
    """Inputs from which a trained token is predicted ``[M]``."""
    targets: NDArray[np.int64]
    """Those tokens ``[M]``."""


def stand_in(sequence: TrainSequence) -> TrainSequence:
    """The smallest sequence that a model takes, of which nothing is trained: alone in a micro-batch, for a rank that
    has nothing of its own to run while others do."""
    none = np.zeros(0, dtype=np.int64)
    return sequence._replace(
        tokens=sequence.tokens[:2],
        num_context=1,
        trained=none,
        rollout_logprobs=sequence.rollout_logprobs[:0],
        positions=none,
        versions=none,
        teacher_logprobs=None,
        teacher_top=None,
        experts=None,
        kept=None,
    )


def pack_share(
    sequences: Sequence[TrainSequence],
    *,
    num_context: int,
    context_rank: int,
    num_sequence_shards: int,
    multiple: int = 1,
) -> PackedShare:
    """Lay out what one rank has of a micro-batch.

    Args:
        sequences: of the micro-batch, at least one.
        num_context: context-parallel ranks.
        context_rank: which of them.
        num_sequence_shards: tensor-parallel ranks that divide the inputs further; 1 without sequence parallelism.
        multiple: what the inputs of a rank are filled up to a multiple of.
    """
    lengths = _filled_lengths([len(s.tokens) - 1 for s in sequences], num_context, num_sequence_shards * multiple)
    total = sum(lengths)
    ids, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    target = np.zeros(total, dtype=np.int64)
    place = np.full(total, -1, dtype=np.int64)
    sequence_of = np.full(total, -1, dtype=np.int64)
    start = num_trained = 0
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        count = len(sequence.tokens) - 1
        ids[start : start + count] = sequence.tokens[:-1]
        positions[start : start + length] = np.arange(length)
        at = start + sequence.trained - 1
        target[at] = sequence.tokens[sequence.trained]
        place[at] = np.arange(num_trained, num_trained + len(at))
        if len(at):
            sequence_of[start : start + count] = number
        num_trained += len(at)
        start += length
    own = _own_inputs(lengths, num_context, context_rank)
    predicted_at = np.flatnonzero(place[own] >= 0)
    top, kept = teacher_top_of(sequences), kept_of(sequences)
    of_targets = place[own][predicted_at]
    return PackedShare(
        input_ids=ids[own],
        position_ids=positions[own],
        lengths=tuple(lengths),
        predicted_at=predicted_at,
        targets=target[own][predicted_at],
        places=of_targets,
        num_trained=num_trained,
        own=own,
        sequence_of=sequence_of[own],
        top_ids=None if top is None else top.ids[of_targets],
        kept_ids=None if kept is None else kept[of_targets],
    )


def pack_further(sequences: Sequence[TrainSequence], share: PackedShare, distance: int) -> FurtherShare:
    """Lay out what one rank has of a micro-batch for a layer that sees token ``i + distance`` at input ``i`` and
    predicts the one after it.

    Args:
        sequences: of the micro-batch.
        share: what :func:`pack_share` has made of them.
        distance: 1 for the first such layer.
    """
    total = sum(share.lengths)
    ids, target = np.zeros(total, dtype=np.int64), np.full(total, -1, dtype=np.int64)
    start = 0
    for sequence, length in zip(sequences, share.lengths, strict=True):
        seen = sequence.tokens[distance:-1]
        ids[start : start + len(seen)] = seen
        far = sequence.trained[sequence.trained > distance]
        target[start + far - 1 - distance] = sequence.tokens[far]
        start += length
    own = target[share.own]
    predicted_at = np.flatnonzero(own >= 0)
    return FurtherShare(ids[share.own], predicted_at, own[predicted_at])


def _filled_lengths(lengths: Sequence[int], num_context: int, num_sequence_shards: int) -> list[int]:
    step = 2 * num_context if num_context > 1 else 1
    filled = [-(-length // step) * step for length in lengths]
    whole = step * num_sequence_shards
    filled[-1] += -sum(filled) % whole
    return filled


def _own_inputs(lengths: Sequence[int], num_context: int, rank: int) -> NDArray[np.int64]:
    """Of each sequence pieces ``rank`` and ``2 c − 1 − rank`` of ``2 c``."""
    if num_context == 1:
        return np.arange(sum(lengths), dtype=np.int64)
    parts: list[NDArray[np.int64]] = []
    start = 0
    for length in lengths:
        pieces = np.arange(start, start + length, dtype=np.int64).reshape(2 * num_context, -1)
        parts += [pieces[rank], pieces[2 * num_context - 1 - rank]]
        start += length
    return np.concatenate(parts)
