"""An objective: how far a token has moved goes through a tanh, so that none is pulled on without bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.objectives.protocol import ObjectiveTerms
from penstock.backends.registry import read_options

if TYPE_CHECKING:
    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions


def tanh_loss(tokens: PolicyTokens, options: ObjectiveOptions, /) -> ObjectiveTerms:
    from bigram_parts.spec import TanhOptions

    scale = read_options(TanhOptions, options.options).scale
    moved = (scale * (tokens.logprobs - tokens.rollout_logprobs)).tanh() / scale
    figures = {"train/moved": (tokens.figure_weights * moved.detach()).sum()}
    return ObjectiveTerms(loss=-(tokens.weights * tokens.advantages * moved).sum(), figures=figures)
