"""The micro-batches of one rank, as models are run over them.

Invariants:

* Each is a slice of the tokens of its rank's :class:`.StepTokens`.
* One that stands in for nothing has the slice of no token. The model runs over a few tokens then, because it runs on
  the other ranks too, and what it says is cut away; what flows back is exactly 0.
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backends.learners.batch.packing import PackedTokens, pack, stand_in
from penstock.backends.learners.batch.sequences import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence


class MicroBatch(NamedTuple):
    """One that a rank runs."""

    packed: PackedTokens
    part: slice
    """Of the rank's tokens of the step."""
    places: Tensor
    """Of its trained tokens among those of the batch, int64 ``[T]`` on the CPU."""

    @property
    def num_tokens(self) -> int:
        """That are trained."""
        return len(self.places)


def laid_out(parts: Sequence[Sequence[TrainSequence]], spare: TrainSequence) -> list[MicroBatch]:
    """The micro-batches of a rank, packed.

    Args:
        parts: their sequences; a part without any gets a stand-in.
        spare: what a stand-in is made of.
    """
    batches: list[MicroBatch] = []
    start = 0
    for part in parts:
        places = joined([sequence.places for sequence in part])
        end = start + len(places)
        packed = pack(part) if part else stand_in(spare)
        batches.append(MicroBatch(packed, slice(start, end), torch.from_numpy(places)))
        start = end
    return batches


def padding_micro_batch(spare: TrainSequence) -> MicroBatch:
    """A micro-batch of no token."""
    return laid_out([[]], spare)[0]
