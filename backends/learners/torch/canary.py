"""A short text whose log-probs tell whether an engine serves the weights that were exported.

The text is what the model itself finds likely when the run opens. Likely tokens have log-probs near 0 that two
implementations compute alike, also in bfloat16, while under wrong weights they are far below.
"""

# Tensor.numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.packing import pack
from penstock.backends.learners.sequences import demonstration_sequence
from penstock.messages.arrays import pack_tokens
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from penstock.backends.learners.packing import PackedTokens
    from penstock.backends.learners.torch.model import PackedModel

CANARY_TOKENS: Final = 16
FIRST_TOKEN: Final = 1
"""Not 0, which is padding in many vocabularies and then has no embedding."""


def choose_canary(model: PackedModel) -> tuple[int, ...]:
    """Token ids: after the first always the likeliest that did not occur yet, so that no loop hides a difference."""
    tokens = [FIRST_TOKEN]
    while len(tokens) < min(CANARY_TOKENS, model.vocab_size):
        logits = model.next_token_logits(tokens)
        logits[tokens] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tuple(tokens)


@torch.no_grad()
def canary_under(model: PackedModel, tokens: tuple[int, ...]) -> Canary:
    """The canary with its log-probs under the current weights, at temperature 1."""
    logprobs = model.logprobs(_packed(tokens), temperature=1.0)
    return Canary(tokens=pack_tokens(tokens), logprobs=logprobs.cpu().numpy().astype("<f4").tobytes())


def _packed(tokens: tuple[int, ...]) -> PackedTokens:
    return pack([demonstration_sequence(tokens[:1], tokens[1:], sample=0)])
