"""What the ranks of a learner are to each other whose policy and critic lie on different ranks, whatever trains.

All ranks hold both; or, with ``learner.critic_ranks``, the last so many hold the critic alone and the others the policy
alone, each part divided over its own ranks. Then both are computed at the same time.

Invariants:

* Between the two go, of each token of a batch, what the models said before its first step (values to the policy's
  ranks, log-probs to the critic's, whose returns may have a KL in them), and of each step figures. No weight, no
  gradient and no activation does.
* What crossed has the same bits on every rank, so all find the same advantages and returns from it.
* Work that some rank had not memory enough for is given up by all ranks, or by none.

| wait | who ends it |
|---|---|
| for the other part, in an exchange | its ranks; a rank that dies, by an error; at the latest the group's timeout |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.worker_group.workers import WorkerGroup

T = TypeVar("T")


class OutOfMemoryError(RuntimeError):
    """A micro-batch was too large for the memory of some rank. Gradients that were added before it are still there."""


class OutOfMemoryElsewhereError(OutOfMemoryError):
    """Only ranks of the other part ran out."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What one rank is to the others."""

    everyone: WorkerGroup
    """All ranks of the learner."""
    own: WorkerGroup
    """Those that hold what this one holds."""
    has_policy: bool
    has_critic: bool
    """Whether this rank does; never where there is no critic."""
    are_apart: bool
    """Whether policy and critic lie on different ranks."""

    def together(self, work: Callable[[], T]) -> T:
        """What this rank makes of its part of some work, when all ranks have done theirs.

        Raises:
            OutOfMemoryError: on every rank, if memory did not suffice on one.
        """
        if not self.are_apart:
            return work()
        try:
            result = work()
        except OutOfMemoryError:
            self.everyone.agree(True)
            raise
        if self.everyone.agree(False):
            raise OutOfMemoryElsewhereError
        return result

    def all_said(
        self, said: Mapping[str, Tensor], names: Sequence[str], count: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """What either part has said about the tokens of a batch, on every rank.

        Args:
            said: by the ranks that hold what this one holds, by name ``[count]``, the same on each of them.
            names: all that is said.
            count: tokens of the batch.
            dtype: what it is said in.
        """
        if not self.are_apart:
            return dict(said)
        table = torch.zeros(len(names), count, dtype=dtype, device=self.everyone.device)
        if self.own.is_first:
            for row, name in zip(table, names, strict=True):
                if name in said:
                    row.copy_(said[name])
        return dict(zip(names, self.everyone.sum_(table), strict=True))

    def all_figures(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Those of both parts on every rank.

        Args:
            figures: the same on each rank that holds what this one holds.
        """
        if not self.are_apart:
            return dict(figures)
        is_told, device = self.own.is_first, self.everyone.device
        told = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in figures.items()}
        return self.everyone.totals([told] if is_told else [])


def side_by_side(workers: WorkerGroup, *, has_critic: bool) -> Roles:
    """Where every rank holds whatever there is."""
    return Roles(workers, workers, has_policy=True, has_critic=has_critic, are_apart=False)
