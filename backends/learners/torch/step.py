"""The trained tokens of a batch and of each of its optimizer steps.

Invariants:

* The tokens of a batch are laid end to end in its own order; those of a step in the order of the micro-batches of a
  rank, each of which is a slice of every tensor here, or, where they couple, all of them in the order of the batch.
* Advantages and returns are those of the whole batch, found once, before its first step. They are computed on the CPU,
  whatever the learner trains on: in float64, and with the same bits each time.
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
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates
from penstock.backends.learners.torch.micro_batch import joined
from penstock.backends.learners.updates import whole_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.learners.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.updates import Update


class Scores(NamedTuple):
    """What the models say about the tokens of one or more micro-batches, float32 ``[N]``."""

    logprobs: Tensor
    entropy: Tensor
    reference: Tensor | None
    """None where it is not asked, or was when the batch was opened."""
    hidden: Tensor | None
    """What the output head of the policy was given, in the dtype of the model ``[N, H]``; None where nobody asks."""

    def first(self, count: int) -> Scores:
        """Those of the first tokens, with their gradient."""
        return Scores(*(None if values is None else values[:count] for values in self))  # type: ignore[arg-type]


class Opening(NamedTuple):
    """What the models said about the tokens of a batch before its first step, float32 ``[N]`` in the order of the
    batch. None where nothing depends on it."""

    logprobs: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None


class BatchTokens:
    """Everything about the tokens of a batch that its steps do not change."""

    def __init__(
        self, batch: TrainBatch, options: ObjectiveOptions, opening: Opening, *, version: int, device: torch.device
    ) -> None:
        """
        Args:
            batch: what is trained.
            options: for advantages and weights.
            opening: with log-probs and reference for ``kl_in: reward``, with values for ``gae``.
            version: of the policy that opens the batch.
            device: of the learner.
        """
        ordered = batch.sequences
        self.options = options
        self.device = device
        self.opening = opening
        self.rollout = torch.from_numpy(np.concatenate([s.rollout_logprobs for s in ordered])).to(device)
        versions = torch.from_numpy(np.concatenate([s.versions for s in ordered])).to(device)
        self.staleness = (version - versions).clamp(min=0)
        self._samples = _samples_of(ordered, len(batch.rewards))
        rewarded = RewardedSamples(
            rewards=torch.from_numpy(batch.rewards),
            group_ids=torch.from_numpy(batch.group_ids),
            samples=self._samples,
            positions=torch.from_numpy(np.concatenate([s.positions for s in ordered])),
        )
        self._kl = self._kl_in_rewards()
        on_cpu = (None if given is None else given.cpu() for given in (self._kl, opening.values))
        kl, values = on_cpu
        estimates = token_estimates(rewarded, options, kl=kl, values=values)
        self.advantages = estimates.advantages.to(device)
        self.returns = None if estimates.returns is None else estimates.returns.to(device)
        self._weights = step_weights(whole_batch(batch), options)[1]

    def figures(self) -> dict[str, float]:
        """Of what was found before the first step."""
        weights = self._samples.spread(self._weights).double()

        def mean(values: Tensor) -> float:
            return float((weights * values.cpu().double()).sum())

        figures = {} if self._kl is None else {"train/kl_reward": mean(self._kl)}
        values = self.opening.values
        if self.returns is not None and values is not None:
            figures |= {"rollout/values": mean(values), "rollout/returns": mean(self.returns)}
            spread = mean(self.returns.square()) - figures["rollout/returns"] ** 2
            errors = self.returns - values
            if spread > 0:
                missed = mean(errors.square()) - mean(errors) ** 2
                figures["train/critic-explained_variance"] = 1.0 - missed / spread
        return figures

    @torch.no_grad()
    def _kl_in_rewards(self) -> Tensor | None:
        if not rewards_need_kl(self.options):
            return None
        opening, empty = self.opening, self.rollout.new_zeros(0)
        assert opening.logprobs is not None, "kl_in: reward"
        assert opening.reference is not None, "kl_coef is not 0"
        tokens = PolicyTokens(
            logprobs=opening.logprobs,
            entropy=empty,
            rollout_logprobs=self.rollout,
            reference_logprobs=opening.reference,
            advantages=empty,
            weights=empty,
            figure_weights=empty,
            staleness=self.staleness,
            samples=self._samples,
        )
        return kl_estimate(self.options.kl_estimator, old_logprobs(tokens, self.options), opening.reference)


class ValueTargets(NamedTuple):
    """What the critic is trained on, float32 ``[N]``."""

    old_values: Tensor
    returns: Tensor
    weights: Tensor
    """The loss is ``Σ weight · value``, a mean."""


class StepTokens:
    """The tokens of one optimizer step."""

    def __init__(
        self, known: BatchTokens, update: Update, parts: Sequence[Sequence[TrainSequence]], *, is_only_step: bool
    ) -> None:
        """
        Args:
            known: of the whole batch.
            update: what is trained.
            parts: its sequences, or those of one rank, micro-batch by micro-batch.
            is_only_step: whether the policy that is trained is the one that opened the batch.
        """
        ordered = [sequence for part in parts for sequence in part]
        samples = _samples_of(ordered, update.num_samples)
        self._samples = Segments(samples.index.to(known.device), samples.count)
        weights, means = (given.to(known.device) for given in step_weights(update, known.options))
        self._weights, self._figure_weights = self._samples.spread(weights), self._samples.spread(means)
        place = torch.from_numpy(joined([sequence.places for sequence in ordered])).to(known.device)
        self._rollout, self._staleness = known.rollout[place], known.staleness[place]
        self._advantages = known.advantages[place]
        opening = known.opening
        self.asks_reference = opening.reference is None
        """Whether the reference, if there is one, has not spoken yet."""
        self._reference = _at(opening.reference, place)
        self._opening = None if is_only_step else _at(opening.logprobs, place)
        self._old_values, self._returns = _at(opening.values, place), _at(known.returns, place)

    def tokens(self, part: slice, scores: Scores) -> PolicyTokens:
        """The tokens of a slice with what the models say about them.

        Args:
            part: which of the tokens.
            scores: of the tokens of that slice.
        """
        return PolicyTokens(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            rollout_logprobs=self._rollout[part],
            reference_logprobs=scores.reference if self._reference is None else self._reference[part],
            advantages=self._advantages[part],
            weights=self._weights[part],
            figure_weights=self._figure_weights[part],
            staleness=self._staleness[part],
            samples=Segments(self._samples.index[part], self._samples.count),
            opening_logprobs=_at(self._opening, part),
        )

    def value_targets(self, part: slice) -> ValueTargets:
        """Of the tokens of a slice; for an estimator with a critic."""
        assert self._old_values is not None, "estimator: gae"
        assert self._returns is not None, "estimator: gae"
        return ValueTargets(self._old_values[part], self._returns[part], self._figure_weights[part])


def step_weights(update: Update, options: ObjectiveOptions) -> tuple[Tensor, Tensor]:
    """The weight of each token of a sample ``[S]``: in the loss, and in a figure. That is a mean over tokens also where
    the loss is a sum over a constant."""
    sizes = torch.from_numpy(update.tokens_per_sample())
    weights = reduction_weights(options.reduction, sizes, constant_tokens=options.constant_tokens)
    return weights, reduction_weights("token_mean", sizes) if options.reduction == "constant" else weights


def _samples_of(sequences: Sequence[TrainSequence], count: int) -> Segments:
    samples = np.asarray([s.sample for s in sequences], dtype=np.int64)
    index = np.repeat(samples, np.asarray([len(s.trained) for s in sequences], dtype=np.int64))
    return Segments(torch.from_numpy(index), count)


def _at(tensor: Tensor | None, place: Tensor | slice) -> Tensor | None:
    return None if tensor is None else tensor[place]
