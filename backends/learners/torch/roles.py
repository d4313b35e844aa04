"""Which ranks of a torch learner hold its policy, and which its critic; see
:mod:`~penstock.backends.learners.training.roles`.

Invariants:

* Every rank makes the groups of both parts, at the same point of its life.
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import torch.distributed as dist

from penstock.backends.learners.torch.critic import PREFIX
from penstock.backends.learners.torch.parallel import make_groups
from penstock.backends.learners.training.roles import Roles, side_by_side

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup

OF_BOTH: Final = ("random", "loss_scale")
"""How names begin, in the state of a trainer, of what every rank needs."""


def is_held(name: str, roles: Roles) -> bool:
    """Whether an entry of the state of a trainer is wanted on a rank."""
    if roles.has_policy:
        return roles.has_critic or not name.startswith(PREFIX)
    return name.startswith(PREFIX) or name.partition("/")[0] in OF_BOTH


def roles_of(workers: WorkerGroup, options: LearnerOptions) -> Roles:
    """What this rank holds; called by all ranks, once.

    Args:
        workers: all ranks, more than ``options.critic_ranks``.
        options: the ``learner:`` block.
    """
    has_critic, num_critics = options.objective.critic != "none", options.critic_ranks
    if not num_critics:
        return side_by_side(workers, has_critic=has_critic)
    num_policies = workers.num_ranks - num_critics
    parts = [_part(workers, 0, num_policies), _part(workers, num_policies, num_critics)]
    for part in parts:
        make_groups(part, options)
    is_critic = workers.rank >= num_policies
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
