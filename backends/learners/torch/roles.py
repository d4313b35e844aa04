"""Which ranks of a learner hold its policy, and which its critic.

All ranks hold both; or, with ``learner.critic_ranks``, the last so many hold the critic alone and the others the policy
alone, each part divided over its own ranks. Then both are computed at the same time.

Invariants:

* Between the two go, of each token of a batch, what the models said before its first step (values to the policy's
  ranks, log-probs to the critic's, whose returns may have a KL in them), and of each step figures. No weight, no
  gradient and no activation does.
* What crossed has the same bits on every rank, so all find the same advantages and returns from it.
* Every rank makes the groups of both parts, at the same point of its life.
* Work that some rank had not memory enough for is given up by all ranks, or by none.

| wait | who ends it |
|---|---|
| for the other part, in an exchange | its ranks; a rank that dies, by an error; at the latest the group's timeout |
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar, cast

import torch
import torch.distributed as dist

from penstock.backends.learners.torch.critic import PREFIX
from penstock.backends.learners.torch.parallel import make_groups
from penstock.backends.learners.torch.rounds import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup

OF_BOTH: Final = ("random", "loss_scale")
"""How names begin, in the state of a trainer, of what every rank needs."""

T = TypeVar("T")


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

    def holds(self, name: str) -> bool:
        """Whether an entry of the state of a trainer is wanted here."""
        if self.has_policy:
            return self.has_critic or not name.startswith(PREFIX)
        return name.startswith(PREFIX) or name.partition("/")[0] in OF_BOTH

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
        """Those of both parts, which are apart, on every rank.

        Args:
            figures: the same on each rank that holds what this one holds.
        """
        is_told, device = self.own.is_first, self.everyone.device
        told = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in figures.items()}
        return self.everyone.totals([told] if is_told else [])


def roles_of(workers: WorkerGroup, options: LearnerOptions) -> Roles:
    """What this rank holds; called by all ranks, once.

    Args:
        workers: all ranks, more than ``options.critic_ranks``.
        options: the ``learner:`` block.
    """
    has_critic, num_critics = options.objective.critic != "none", options.critic_ranks
    if not num_critics:
        return Roles(workers, workers, has_policy=True, has_critic=has_critic, are_apart=False)
    num_policies = workers.num_ranks - num_critics
    is_critic = workers.rank >= num_policies
    parts = [_part(workers, 0, num_policies), _part(workers, num_policies, num_critics)]
    for part in parts:
        make_groups(part, options)
    return Roles(workers, parts[is_critic], has_policy=not is_critic, has_critic=is_critic, are_apart=True)


def _part(workers: WorkerGroup, first: int, count: int) -> WorkerGroup:
    """Some neighbouring ranks of all; of other ranks the view has no use but to make groups by it."""
    ranks, limit = range(first, first + count), timedelta(seconds=workers.timeout_s)
    rank = workers.rank - first if workers.rank in ranks else -1
    control, tensors = None, None
    if count > 1:
        control = dist.new_group(list(ranks), timeout=limit, backend="gloo")
        tensors = dist.new_group(list(ranks), timeout=limit)
    return dataclasses.replace(
        workers,
        rank=rank,
        num_ranks=count,
        first_rank=first,
        control=cast("ProcessGroup | None", control),
        tensors=cast("ProcessGroup | None", tensors),
    )
