"""A short text whose log-probs tell whether an engine serves the weights that were exported.

The text is what the model itself finds likely when the run opens, so it stays where the model knows its way. At each of
its places the log-probs of all its tokens are told, likely and unlikely ones: a thousand numbers in which every matrix
has a part, see :mod:`penstock.messages.canary` for how they are compared.
"""

# Tensor.numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from penstock.messages.arrays import pack_tokens
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CANARY_TOKENS: Final = 32
FIRST_TOKEN: Final = 1
"""Not 0, which is padding in many vocabularies and then has no embedding."""


class CanaryModel(Protocol):
    """A model that is asked for its canary."""

    @property
    def vocab_size(self) -> int: ...

    def next_token_logits(self, tokens: Sequence[int], /) -> Tensor:
        """What the model says after each of ``tokens [T]``: float32 ``[T, V]`` on the CPU, for the caller to keep."""
        ...


def choose_canary(model: CanaryModel) -> tuple[int, ...]:
    """Token ids: after the first always the likeliest that did not occur yet, so that no loop hides a difference."""
    tokens = [FIRST_TOKEN]
    while len(tokens) < min(CANARY_TOKENS, model.vocab_size):
        logits = model.next_token_logits(tokens)[-1]
        logits[tokens] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tuple(tokens)


def canary_under(model: CanaryModel, tokens: tuple[int, ...]) -> Canary:
    """The canary with its log-probs under the current weights."""
    logprobs = model.next_token_logits(tokens[:-1]).log_softmax(-1)[:, tokens]
    return Canary(tokens=pack_tokens(tokens), logprobs=logprobs.numpy().astype("<f4").tobytes())
