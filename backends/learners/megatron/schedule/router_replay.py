"""Choices of experts that an engine recorded, laid out as the inputs of a micro-batch are.

Invariants:

* A choice belongs to an input: the token itself, not the one that is predicted from it.
* An input without a record has −1 everywhere, and the router chooses for it.
* A record that cannot be of this model is an error, never cut to fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.bridge.architecture import Experts


def choices_of(sequence: TrainSequence, experts: Experts) -> NDArray[np.int16] | None:
    """``[N, layers with experts, k]`` of the first N inputs; None where nothing was recorded.

    Raises:
        UserFault: the model has other layers, or fewer experts.
    """
    record = sequence.experts
    if record is None:
        return None
    _, num_layers, per_token = record.shape
    sparse = np.flatnonzero(np.asarray(experts.layers))
    if num_layers == len(experts.layers):  # an engine may report a layer that has none, too
        record = record[:, sparse]
    elif num_layers != len(sparse):
        raise UserFault(
            f"the engine recorded experts of {num_layers} layers, and the model has {len(sparse)} layers with experts "
            f"among {len(experts.layers)}; learner.megatron.router_replay needs an engine with the learner's model"
        )
    if per_token != experts.per_token or (record.size and int(record.max()) >= experts.count):
        raise UserFault(
            f"the engine recorded {per_token} experts for a token, the highest {int(record.max())}; the model has "
            f"{experts.per_token} of {experts.count}; learner.megatron.router_replay needs an engine with the "
            "learner's model"
        )
    return record


def laid_out(sequences: Sequence[TrainSequence], lengths: Sequence[int], experts: Experts) -> NDArray[np.int16] | None:
    """``[T, layers with experts, k]`` of a micro-batch whose sequences are filled up to ``lengths``; None where none
    of them has a record."""
    found = [choices_of(sequence, experts) for sequence in sequences]
    if all(choices is None for choices in found):
        return None
    shape = (sum(lengths), sum(experts.layers), experts.per_token)
    whole: NDArray[np.int16] = np.full(shape, -1, dtype=np.int16)
    start = 0
    for choices, length in zip(found, lengths, strict=True):
        if choices is not None:
            whole[start : start + len(choices)] = choices
        start += length
    return whole


def replay_fraction(sequences: Sequence[TrainSequence], experts: Experts) -> float:
    """Of the inputs of these sequences, how many have a record in every layer."""
    recorded = total = 0
    for sequence in sequences:
        total += len(sequence.tokens) - 1
        if (choices := choices_of(sequence, experts)) is not None:
            recorded += int((choices >= 0).all(axis=(1, 2)).sum())
    return recorded / total if total else 0.0
