"""A short text whose log-probs tell whether an engine serves the weights that were exported.

The text is what the model itself finds likely when the run opens. Likely tokens have log-probs near 0 that two
implementations compute alike, also in bfloat16, while under wrong weights they are far below.
"""

# Tensor.numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from penstock.backends.learners.sequences import demonstration_sequence
from penstock.messages.arrays import pack_tokens
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.sequences import TrainSequence

CANARY_TOKENS: Final = 16
FIRST_TOKEN: Final = 1
"""Not 0, which is padding in many vocabularies and then has no embedding."""


class CanaryModel(Protocol):
    """A model that is asked for its canary."""

    @property
    def vocab_size(self) -> int: ...

    def next_token_logits(self, tokens: Sequence[int], /) -> Tensor:
        """What the model says after ``tokens``: float32 ``[V]`` on the CPU, for the caller to keep."""
        ...


def choose_canary(model: CanaryModel) -> tuple[int, ...]:
    """Token ids: after the first always the likeliest that did not occur yet, so that no loop hides a difference."""
    tokens = [FIRST_TOKEN]
    while len(tokens) < min(CANARY_TOKENS, model.vocab_size):
        logits = model.next_token_logits(tokens)
        logits[tokens] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tuple(tokens)


def canary_sequence(tokens: tuple[int, ...]) -> TrainSequence:
    """As it is scored: at temperature 1."""
    return demonstration_sequence(tokens[:1], tokens[1:], sample=0)


def canary_with(tokens: tuple[int, ...], logprobs: Tensor) -> Canary:
    """The canary as it is published.

    Args:
        tokens: of it.
        logprobs: of all but the first, under the weights that are published.
    """
    return Canary(tokens=pack_tokens(tokens), logprobs=logprobs.cpu().numpy().astype("<f4").tobytes())
