"""The micro-batches of one data-parallel rank, as megatron-core's schedules take them.

Invariants:

* Each is a slice of the tokens of its replica's :class:`.StepTokens`.
* One that stands in for nothing has the slice of no token: the model runs over a few tokens then, because it runs on
  the other replicas too, and what it says is cut away; what flows back is exactly 0.
* Their number is a multiple of what the schedule asks for.
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backends.learners.batch.sequences import joined
from penstock.backends.learners.megatron.schedule.packed import stand_in
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores


class MicroBatches(NamedTuple):
    """Those of one call of a schedule."""

    sequences: list[list[TrainSequence]]
    """By micro-batch; a few tokens where it stands in for nothing."""
    parts: list[slice]
    """Of the replica's tokens, by micro-batch."""
    places: Tensor
    """Of the replica's tokens among those of the batch, int64 on the CPU."""

    def own(self, number: int, scores: VocabularyScores) -> VocabularyScores:
        """Of what was said about a micro-batch that which counts, with its gradient."""
        return scores.first(self.num_tokens(number))

    def num_tokens(self, number: int) -> int:
        """Of a micro-batch, that count."""
        count: int = self.parts[number].stop - self.parts[number].start
        return count


def check_length(sequence: TrainSequence, what: str, architecture: Architecture) -> None:
    """
    Raises:
        UserFault: the sequence is longer than the model's context.
    """
    if len(sequence.tokens) > architecture.max_positions:
        raise UserFault(
            f"{what} has {len(sequence.tokens)} tokens, and the model takes at most {architecture.max_positions}"
        )


def laid_out(parts: Sequence[Sequence[TrainSequence]], spare: TrainSequence, *, multiple: int) -> MicroBatches:
    """
    Args:
        parts: the sequences of each; a part without any gets a stand-in.
        spare: what a stand-in is made of.
        multiple: what their number is filled up to a multiple of, with stand-ins.
    """
    filled = [list(part) for part in parts]
    filled += [[] for _ in range(-len(filled) % multiple)]
    slices: list[slice] = []
    start = 0
    for part in filled:
        end = start + sum(len(sequence.trained) for sequence in part)
        slices.append(slice(start, end))
        start = end
    places = joined([sequence.places for part in filled for sequence in part])
    return MicroBatches([part or [stand_in(spare)] for part in filled], slices, torch.from_numpy(places))
