"""The trained tokens of a step, laid end to end in the order of its micro-batches.

Invariants:

* A micro-batch is a slice of every tensor here; all of them together are the step.
* Advantages are computed on the CPU, whatever the learner trains on: in float64, and with the same bits each time.
* Advantages that need no log-prob are there from the start; the others once :meth:`StepTokens.estimate` was called
  with those of the whole step.
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.backends.learners.objectives.kl import kl_estimate
from penstock.backends.learners.objectives.objective import old_logprobs, rewards_need_kl
from penstock.backends.learners.objectives.protocol import PolicyTokens
from penstock.backends.learners.objectives.reduction import reduction_weights
from penstock.backends.learners.objectives.segments import Segments
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_advantages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.learners.sequences import TrainBatch, TrainSequence


class Scores(NamedTuple):
    """What the models say about the tokens of one or more micro-batches, float32 ``[N]``."""

    logprobs: Tensor
    entropy: Tensor
    reference: Tensor | None

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Those of several micro-batches, in order."""
        references = [part.reference for part in parts if part.reference is not None]
        return cls(
            logprobs=torch.cat([part.logprobs for part in parts]),
            entropy=torch.cat([part.entropy for part in parts]),
            reference=torch.cat(references) if references else None,
        )


class StepTokens:
    """Everything about the tokens of a step that is fixed before the models have spoken."""

    def __init__(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[TrainSequence]],
        options: ObjectiveOptions,
        *,
        version: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            batch: what is trained.
            parts: its sequences, micro-batch by micro-batch.
            options: for advantages and weights.
            version: of the policy that opens the step.
            device: of the learner.
        """
        self._options = options
        counts = [sum(len(sequence.trained) for sequence in part) for part in parts]
        ends = np.cumsum(counts)
        self.slices = [slice(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]
        ordered = [sequence for part in parts for sequence in part]
        index = np.repeat(np.asarray([s.sample for s in ordered]), [len(s.trained) for s in ordered])
        samples = Segments(torch.from_numpy(index), len(batch.rewards))
        self._samples = Segments(samples.index.to(device), samples.count)
        self._rollout = torch.from_numpy(np.concatenate([s.rollout_logprobs for s in ordered])).to(device)
        versions = torch.from_numpy(np.concatenate([s.versions for s in ordered])).to(device)
        self._staleness = (version - versions).clamp(min=0)
        sizes = torch.from_numpy(batch.tokens_per_sample()).to(device)
        weights = reduction_weights(options.reduction, sizes, constant_tokens=options.constant_tokens)
        # A figure is a mean over tokens, also where the loss is a sum over a constant.
        means = reduction_weights("token_mean", sizes) if options.reduction == "constant" else weights
        self._weights, self._figure_weights = self._samples.spread(weights), self._samples.spread(means)
        self._rewarded = RewardedSamples(
            rewards=torch.from_numpy(batch.rewards),
            group_ids=torch.from_numpy(batch.group_ids),
            samples=samples,
            positions=torch.from_numpy(np.concatenate([s.positions for s in ordered])),
        )
        self._advantages = torch.zeros_like(self._rollout)
        if not rewards_need_kl(options):
            self._advantages = token_advantages(self._rewarded, options).to(device)

    @torch.no_grad()
    def estimate(self, scores: Scores) -> dict[str, Tensor]:
        """Find the advantages that depend on log-probs; the figures that belong to them.

        Args:
            scores: of the whole step.
        """
        if not rewards_need_kl(self._options):
            return {}
        tokens = self.tokens(slice(None), scores)
        assert tokens.reference_logprobs is not None, "kl_coef is not 0"
        old = old_logprobs(tokens, self._options)
        kl = kl_estimate(self._options.kl_estimator, old, tokens.reference_logprobs)
        self._advantages = token_advantages(self._rewarded, self._options, kl=kl.cpu()).to(kl.device)
        return {"train/kl_reward": (tokens.figure_weights * kl).sum(dtype=torch.float64)}

    def tokens(self, part: slice, scores: Scores) -> PolicyTokens:
        """The tokens of a slice with what the models say about them.

        Args:
            part: one of ``slices``, or everything.
            scores: of the tokens of that slice.
        """
        return PolicyTokens(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            rollout_logprobs=self._rollout[part],
            reference_logprobs=scores.reference,
            advantages=self._advantages[part],
            weights=self._weights[part],
            figure_weights=self._figure_weights[part],
            staleness=self._staleness[part],
            samples=Segments(self._samples.index[part], self._samples.count),
        )
