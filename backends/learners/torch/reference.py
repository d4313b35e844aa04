"""The policy that the KL term pulls to.

Three kinds: a frozen copy of the model as it was before the first step; the same, made anew from the policy every so
many batches; and, of a model with adapters, the model without them, which takes no memory of its own.

Invariants:

* Nothing of it takes a gradient.
* Between two refreshes its weights do not change, so a checkpoint need not copy them.
* It is refreshed between two batches: right after the one whose version ``learner.objective.reference_every`` divides.
  A checkpoint says which policy it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.torch.fused import fuse
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import replica
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from penstock.backends.learners.batch.packing import PackedTokens
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.lora import Adapters
    from penstock.backends.learners.worker_group.workers import WorkerGroup


class BasePolicy(PackedModel):
    """A model with adapters as it is without them."""

    def __init__(self, policy: PackedModel, adapters: Adapters) -> None:
        super().__init__(policy.model, policy.device)
        self.checkpoint_names = policy.checkpoint_names
        self.layout = policy.layout
        self._switch = adapters
        self.freeze_facts(policy.dtype)

    def logprobs(self, packed: PackedTokens, *, temperature: float) -> Tensor:
        """See :meth:`.PackedModel.logprobs`."""
        with self._switch.switched_off():
            return super().logprobs(packed, temperature=temperature)

    def weights(self, read: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`.PackedModel.weights`."""
        return self._switch.base(read)


def new_reference(policy: PackedModel, options: LearnerOptions, workers: WorkerGroup = SOLO) -> PackedModel | None:
    """The reference of a run that begins. A model with adapters always has one: its base has to be kept somewhere."""
    if policy.adapters is not None:
        return BasePolicy(policy, policy.adapters)
    if not needs_reference(options.objective):
        return None
    reference = frozen(replica(policy, workers, options))
    fuse(reference, workers, options)
    return reference


def frozen(model: PackedModel) -> PackedModel:
    """The same model, never to be trained."""
    model.model.requires_grad_(requires_grad=False)
    return model


@torch.no_grad()
def refresh(reference: PackedModel, policy: PackedModel) -> None:
    """Make the reference what the policy is now, in the memory that it has. Both are divided over ranks alike."""
    sources = dict(policy.model.named_parameters()) | dict(policy.model.named_buffers())
    for name, tensor in (*reference.model.named_parameters(), *reference.model.named_buffers()):
        tensor.copy_(sources[name])
