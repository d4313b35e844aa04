"""The canary of weights that are divided over ranks: all of them compute it, and all know it then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.canary import canary_sequence, canary_with
from penstock.backends.learners.sequences import demonstration_sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.megatron.trainable import TrainableModel
    from penstock.backends.learners.megatron.voices import Voices
    from penstock.messages.weights import Canary


class SharedCanary:
    """Asks a model that all ranks have a share of; all are asked alike."""

    def __init__(self, trainable: TrainableModel, voices: Voices) -> None:
        self._runner = trainable.runner
        self._voices = voices
        self.vocab_size = trainable.model.architecture.vocab_size

    def next_token_logits(self, tokens: Sequence[int], /) -> Tensor:
        """See :class:`.CanaryModel`."""
        # The appended id is what would be predicted; it is a target only and never read here.
        logits = self._runner.last_logits(demonstration_sequence(tokens, [0], sample=0))
        return self._voices.same(logits, self.vocab_size).cpu()

    def under(self, tokens: tuple[int, ...]) -> Canary:
        """The canary with its log-probs under the current weights."""
        found = self._runner.scores([[canary_sequence(tokens)]] * self._runner.multiple, temperature=1.0)
        return canary_with(tokens, self._voices.same(found[0].logprobs if found else None, len(tokens) - 1))
