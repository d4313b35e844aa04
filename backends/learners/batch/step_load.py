"""What a step of a learner has to do, from the lengths of its sequences alone: by the division that real learners make.

Invariants:

* The micro-batches are those of :func:`.divide_over_ranks`; nothing here divides by itself.
* On one rank the largest share is all there is: ``imbalance`` is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.backends.learners.batch.packing import divide_over_ranks
from penstock.backends.learners.batch.sequences import TrainSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NOMINAL_HIDDEN_SIZE: Final = 4096
"""Of a model whose width is not known: it decides by how much attention makes a long sequence dearer."""
_NO_PLACES: Final = np.zeros(0, dtype=np.int64)
_NO_LOGPROBS: Final = np.zeros(0, dtype=np.float32)
_TOKEN: Final = np.zeros(1, dtype=np.int32)
"""All tokens of all sequences: one number in memory."""


class SequenceLength(NamedTuple):
    """Of one sequence that is trained on."""

    prompt: int
    """Sequences with the same number have the same context."""
    num_context: int
    """Tokens before the response."""
    num_response: int
    """Tokens of the response, at least 1."""


class StepLoad(NamedTuple):
    """Of one pass over a batch."""

    num_rounds: int
    """Micro-batches, one after the other; ranks have theirs side by side."""
    imbalance: float
    """Tokens of the largest share of each round ÷ those of the mean share over all rounds, 1 or more."""


def step_load(lengths: Sequence[SequenceLength], *, num_ranks: int, max_tokens: int) -> StepLoad:
    """Of sequences of these lengths.

    Args:
        lengths: those without a response are left out, as learners do.
        num_ranks: that divide the sequences, at least 1.
        max_tokens: of a micro-batch.
    """
    trained = [length for length in lengths if length.num_response > 0]
    if not trained:
        return StepLoad(0, 1.0)
    longest = max(max(1, length.num_context) + length.num_response for length in trained)
    tokens = np.broadcast_to(_TOKEN, (longest,))
    sequences = [_stand_in(index, length, tokens) for index, length in enumerate(trained)]
    division = divide_over_ranks(sequences, num_ranks=num_ranks, max_tokens=max_tokens, hidden_size=NOMINAL_HIDDEN_SIZE)
    rounds = [[_num_tokens(part) for part in parts] for parts in zip(*division.ranks, strict=True)]
    total = sum(map(sum, rounds))
    return StepLoad(len(rounds), num_ranks * sum(map(max, rounds)) / total if total else 1.0)


def _stand_in(index: int, length: SequenceLength, tokens: NDArray[np.int32]) -> TrainSequence:
    """A sequence of this length, whose tokens are the first of those."""
    num_context = max(1, length.num_context)
    return TrainSequence(
        tokens=tokens[: num_context + length.num_response],
        num_context=num_context,
        prompt=length.prompt,
        trained=_NO_PLACES,
        rollout_logprobs=_NO_LOGPROBS,
        positions=_NO_PLACES,
        versions=_NO_PLACES,
        sample=index,
    )


def _num_tokens(part: Sequence[TrainSequence]) -> int:
    """Inputs of a micro-batch, each shared context once."""
    contexts = {sequence.prompt: sequence.num_context for sequence in part}
    return sum(len(sequence.tokens) - 1 - sequence.num_context for sequence in part) + sum(contexts.values())
