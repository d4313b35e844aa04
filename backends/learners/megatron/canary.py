"""The canary of weights that are divided over ranks: all of them compute it, and all know it then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.batch.sequences import open_ended_sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.megatron.layout.source_ranks import SourceRanks
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel


class SharedCanary:
    """Asks a model that all ranks have a share of; all are asked alike."""

    def __init__(self, trainable: TrainableModel, sources: SourceRanks) -> None:
        self._runner = trainable.runner
        self._sources = sources
        self.vocab_size = trainable.model.architecture.vocab_size

    def next_token_logits(self, tokens: Sequence[int], /) -> Tensor:
        """See :class:`.CanaryModel`."""
        logits = self._runner.whole_logits(open_ended_sequence(tokens))
        found = self._sources.same(None if logits is None else logits.flatten(), len(tokens) * self.vocab_size)
        return found.view(len(tokens), self.vocab_size).cpu()
