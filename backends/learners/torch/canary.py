"""The canary of a torch learner's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.canary import canary_sequence, canary_with
from penstock.backends.learners.packing import pack

if TYPE_CHECKING:
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.messages.weights import Canary


@torch.no_grad()
def canary_under(model: PackedModel, tokens: tuple[int, ...]) -> Canary:
    """The canary with its log-probs under the current weights, at temperature 1."""
    return canary_with(tokens, model.logprobs(pack([canary_sequence(tokens)]), temperature=1.0))
