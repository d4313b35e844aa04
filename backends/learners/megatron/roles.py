"""Which ranks of a Megatron learner hold its policy, and which its critic; see
:mod:`~penstock.backends.learners.training.roles`.

megatron-core divides the ranks of torch's default group, by numbers that begin at 0, and keeps the groups that come of
it for the whole process. So where policy and critic lie on different ranks, the default group of a process becomes that
of its own part: whatever asks for "all ranks" from then on, in megatron-core or here, is told of those of the part.

Invariants:

* What goes through all ranks names the group of all of them. Of that group only the number of a rank in it is known any
  more, not which rank of the default group that is: collectives go through it, and nothing that names a rank.
* Groups are made at the same point of the life of every rank: those of all before the parts have worlds of their own,
  those of a part after that.
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from penstock.backends.learners.training.roles import Roles, side_by_side

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup


def roles_of(workers: WorkerGroup, options: LearnerOptions) -> Roles:
    """What this rank holds; called by all ranks, once. From then on the default group is that of the own part.

    Args:
        workers: all ranks, more than ``options.critic_ranks``.
        options: the ``learner:`` block.
    """
    if not options.critic_ranks:
        return side_by_side(workers, has_critic=options.objective.critic != "none")
    limit = timedelta(seconds=workers.timeout_s)
    num_policies = workers.num_ranks - options.critic_ranks
    parts = range(num_policies), range(num_policies, workers.num_ranks)
    everyone = dataclasses.replace(workers, tensors=dist.group.WORLD)
    worlds = [cast("ProcessGroup", dist.new_group(list(ranks), timeout=limit)) for ranks in parts]
    is_critic = workers.rank >= num_policies
    dist.group.WORLD = worlds[is_critic]
    ranks, control = parts[is_critic], None
    if len(ranks) > 1:
        control = cast("ProcessGroup", dist.new_group(timeout=limit, backend="gloo"))
    own = dataclasses.replace(workers, rank=workers.rank - ranks.start, num_ranks=len(ranks), control=control)
    return Roles(everyone, own, has_policy=not is_critic, has_critic=is_critic, are_apart=True)
