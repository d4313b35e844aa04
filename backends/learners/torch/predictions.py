"""What the models say about a batch before its first optimizer step, as far as anything depends on it.

Invariants:

* It is found with the very micro-batches of the first pass, so a policy that has not moved yet is at a distance of
  exactly 0 from it.
* Over ranks each asks about its own micro-batches; all know all of it afterwards, with the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.training.coupling import asks_policy, scattered
from penstock.backends.learners.training.step import Predictions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.micro_batch import MicroBatch
    from penstock.backends.learners.torch.models import Models
    from penstock.backends.learners.torch.rounds import Rounds
    from penstock.backends.learners.worker_group.workers import WorkerGroup


@torch.no_grad()
def open_batch(
    models: Models,
    batches: Sequence[MicroBatch],
    spare: MicroBatch,
    rounds: Rounds,
    workers: WorkerGroup,
    options: LearnerOptions,
    *,
    num_tokens: int,
) -> Predictions:
    """
    Args:
        models: that are asked.
        batches: of this rank, of all updates of the first pass.
        spare: of no token.
        rounds: what runs them.
        worker group: all ranks.
        options: the ``learner:`` block.
        num_tokens: that are trained, of the whole batch.

    Raises:
        OutOfMemoryError: a micro-batch was too large.
    """
    critic, with_policy = models.critic, asks_policy(options)
    if not with_policy and critic is None:
        return Predictions()

    def ask(batch: MicroBatch) -> dict[str, Tensor]:
        said: dict[str, Tensor] = {}
        hidden = None
        if with_policy or (critic is not None and critic.is_shared):
            scores = models.scores(batch, with_reference=with_policy)
            hidden = scores.hidden
            if with_policy:
                said["logprobs"] = scores.logprobs
            if scores.reference is not None:
                said["reference"] = scores.reference
        if critic is not None:
            said["values"] = critic.values(batch.packed, hidden)[: batch.num_tokens]
        return said

    found = rounds.run("opening", batches, spare, ask)
    places = torch.cat([batch.places for batch in batches]).to(models.policy.device)
    return Predictions(
        **{
            name: workers.sum_(scattered(torch.cat([said[name] for said in found]), places, num_tokens))
            for name in found[0]
        }
    )
