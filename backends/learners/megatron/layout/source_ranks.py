"""Which ranks speak for what all ranks of a replica have computed together, and how the others hear of it.

After a pass every tensor- and context-parallel rank of the last stage has the log-probs of the replica's micro-batches,
and no other rank has. The source rank of a replica is the first of those that have them.

Invariants:

* What is exchanged has the same bits on every rank: each value comes from one source rank, and zeros from all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.worker_group.workers import WorkerGroup


class SourceRanks:
    """One rank's end."""

    def __init__(self, workers: WorkerGroup, layout: Layout) -> None:
        self._workers = workers
        place = layout.place(workers.rank)
        self.replica = place.data
        """Which data-parallel rank this one is."""
        self.is_source = place.stage == layout.pipeline - 1 and place.tensor == place.context == 0
        """Whether it speaks for its replica."""
        self.is_first_source = self.is_source and place.data == 0
        """Whether it speaks where all replicas have computed the same."""

    def broadcast(self, values: Sequence[Tensor], places: Tensor, count: int) -> Tensor:
        """Values of tokens, on every rank: float32 ``[count]``.

        Args:
            values: of this replica's micro-batches, ``[T]`` in all; not looked at on a rank that is no source.
            places: where they belong, int64 ``[T]`` on the CPU.
            count: of all replicas together.
        """
        found = torch.zeros(count, device=self._workers.device)
        if self.is_source and values:
            found.index_copy_(0, places.to(self._workers.device), torch.cat(list(values)).float())
        return self._workers.sum_(found)

    def same(self, values: Tensor | None, count: int) -> Tensor:
        """What every replica has computed alike, on every rank: float32 ``[count]``."""
        found = torch.zeros(count, device=self._workers.device)
        if self.is_first_source and values is not None:
            found.copy_(values)
        return self._workers.sum_(found)

    def totals(self, figures: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Sums over the tokens of each micro-batch of each replica, added up."""
        return self._workers.totals(figures if self.is_source else ())

    def whole(self, figures: Mapping[str, Tensor]) -> dict[str, float]:
        """Figures that every rank has found of all tokens."""
        return self._workers.totals([figures] if self._workers.is_first else ())
