"""The models that a step of training asks: policy, reference and critic, together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.training.step import Scores

if TYPE_CHECKING:
    from penstock.backends.learners.torch.critic import Critic
    from penstock.backends.learners.torch.micro_batch import MicroBatch
    from penstock.backends.learners.torch.model import PackedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What they say about micro-batches."""

    policy: PackedModel
    reference: PackedModel | None
    critic: Critic | None
    temperature: float
    entropy_gradient: bool
    """Whether the entropy of the policy is trained on."""

    @property
    def roots(self) -> list[torch.nn.Module]:
        """Every module that is called as a whole."""
        has_own = self.reference is not None and self.reference.model is not self.policy.model
        references = [self.reference.model] if self.reference is not None and has_own else []
        return [self.policy.model, *references, *([] if self.critic is None else self.critic.roots)]

    def scores(self, batch: MicroBatch, *, with_reference: bool) -> Scores:
        """Of the trained tokens of a micro-batch, of none if it stands in for nothing."""
        found = self.policy.scores(
            batch.packed,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            wants_hidden=self.critic is not None and self.critic.is_shared,
        )
        reference = None
        if with_reference and self.reference is not None:
            with torch.no_grad():
                reference = self.reference.logprobs(batch.packed, temperature=self.temperature)
        scores = Scores(found.logprobs, found.entropy, reference, found.hidden, found.top)
        return scores.first(batch.num_tokens)
