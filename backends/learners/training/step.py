"""The trained tokens of a batch and of each of its optimizer steps.

Invariants:

* The tokens of a batch are laid end to end in its own order; those of a step in the order of the micro-batches of a
  rank, each of which is a slice of every tensor here, or, where they couple, all of them in the order of the batch.
* Tokens that are imitated have no advantage and no return, and take no part in finding those of the others.
* Advantages and returns are those of the whole batch, found once, before its first step. They are computed on the CPU,
  whatever the learner trains on: in float64, and with the same bits each time.
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.backends.learners.batch.components import component_rewards
from penstock.backends.learners.batch.sequences import joined, teacher_top_of
from penstock.backends.learners.batch.updates import whole_batch
from penstock.backends.learners.hooks.objective import advantages_by
from penstock.backends.learners.hooks.protocols import AdvantageInput, Segments
from penstock.backends.learners.objectives.asked import rewards_need_kl
from penstock.backends.learners.objectives.distillation import sampled_reverse_kl
from penstock.backends.learners.objectives.kl import kl_estimate
from penstock.backends.learners.objectives.objective import old_logprobs
from penstock.backends.learners.objectives.protocol import PolicyTokens
from penstock.backends.learners.objectives.spec import ESTIMATORS, loss_of
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, TokenEstimates, token_estimates
from penstock.backends.learners.objectives.values import clipped_value_loss
from penstock.backends.learners.training.per_sample import judged_of, means_by_loss, pairs_of, step_weights
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.options import ObjectiveOptions


class Scores(NamedTuple):
    """What the models say about the tokens of one or more micro-batches, float32 ``[N]``."""

    logprobs: Tensor
    entropy: Tensor
    reference: Tensor | None
    """None where it is not asked, or was when the batch was opened."""
    hidden: Tensor | None
    """What the output head of the policy was given, in the dtype of the model ``[N, H]``; None where nobody asks."""
    top: Tensor | None = None
    """Log-probs of the tokens that the teacher finds likeliest ``[N, k]``; None where it has named none."""

    def first(self, count: int) -> Scores:
        """Those of the first tokens, with their gradient."""
        return Scores(*(None if values is None else values[:count] for values in self))  # type: ignore[arg-type]


class Predictions(NamedTuple):
    """What the models said about the tokens of a batch before its first step, float32 ``[N]`` in the order of the
    batch. None where nothing depends on it."""

    logprobs: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None


class BatchTokens:
    """Everything about the tokens of a batch that its steps do not change."""

    def __init__(
        self, batch: TrainBatch, options: ObjectiveOptions, opening: Predictions, *, version: int, device: torch.device
    ) -> None:
        """
        Args:
            batch: what is trained.
            options: for advantages and weights.
            opening: with log-probs and reference for ``kl_in: reward``, with log-probs for ``opd_kl_coef`` unless
                ``old_logprobs: engine``, with values for ``gae``.
            version: of the policy that opens the batch.
            device: of the learner.
        """
        ordered = batch.sequences
        self.options = options
        self.version = version
        self.groups = batch.groups
        self.user_values: Tensor | None = None
        """What functions of the user's returned, on the CPU; None where there are none."""
        self.device = device
        self.opening = opening
        self.rollout = torch.from_numpy(np.concatenate([s.rollout_logprobs for s in ordered])).to(device)
        versions = torch.from_numpy(np.concatenate([s.versions for s in ordered])).to(device)
        is_recorded = _flags(ordered, [s.is_recorded for s in ordered]).to(device)
        self.staleness = torch.where(is_recorded, -1, (version - versions).clamp(min=0))
        self.is_of_one_version = _flags(ordered, [s.is_of_one_version for s in ordered]).to(device)
        imitated = _flags(ordered, [s.is_imitated for s in ordered])
        self._own = None if not bool(imitated.any()) else ~imitated
        """Tokens of the objective, on the CPU; None where all are."""
        self.imitated = None if self._own is None else imitated.to(device)
        self.knows_rollout = bool(self._of_objective(self.rollout).isfinite().all())
        self.rewards, self.group_ids = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_ids)
        self._samples = _samples_of(ordered, len(batch.rewards))
        self._kl = self._kl_in_rewards()
        self.teacher = _teacher_of(ordered, device)
        """Its log-probs of the tokens ``[N]``; None where there is no teacher."""
        self.teacher_top = self._top_of_teacher(ordered)
        """Those of the tokens that it finds likeliest ``[N, k]``; None where nothing asks for them."""
        self._reverse_kl = self._kl_to_teacher()
        positions = torch.from_numpy(np.concatenate([s.positions for s in ordered]))
        estimates = self._estimates(positions)
        self.advantages = self._among_all(estimates.advantages).to(device)
        self.returns = None if estimates.returns is None else self._among_all(estimates.returns).to(device)
        whole = whole_batch(batch)
        weights, means = step_weights(whole, self)
        self._weights = means_by_loss(whole, means)
        if options.reduction_function is not None:
            self.user_values = weights.double()
        if options.advantage_function is not None:
            found = estimates.advantages.double()
            self.user_values = found if self.user_values is None else torch.cat([self.user_values, found])

    def figures(self) -> dict[str, float]:
        """Of what was found before the first step."""
        weights = self._of_objective(self._samples.spread(self._weights).double())

        def mean(values: Tensor) -> float:
            return float((weights * self._of_objective(values.cpu().double())).sum())

        figures = {} if self._kl is None else {"train/kl_reward": mean(self._kl)}
        if self._reverse_kl is not None:
            figures["train/opd_reverse_kl"] = mean(self._reverse_kl)
        if not self.knows_rollout:
            figures["train/unknown_logprobs"] = float(self._of_objective(self.rollout).isnan().double().mean())
        values = self.opening.values
        if self.returns is not None and values is not None:
            figures |= {"rollout/values": mean(values), "rollout/returns": mean(self.returns)}
            spread = mean(self.returns.square()) - figures["rollout/returns"] ** 2
            errors = self.returns - values
            if spread > 0:
                missed = mean(errors.square()) - mean(errors) ** 2
                figures["train/critic-explained_variance"] = 1.0 - missed / spread
        return figures

    def _estimates(self, positions: Tensor) -> TokenEstimates:
        """Of the tokens of the objective: those that are imitated take no part, in whitening neither."""
        samples = Segments(self._of_objective(self._samples.index), self._samples.count)
        kl, values, reverse_kl = (
            None if given is None else self._of_objective(given.cpu())
            for given in (self._kl, self.opening.values, self._reverse_kl)
        )
        if not len(samples.index):
            return TokenEstimates(torch.zeros(0), None if values is None else torch.zeros(0))
        components = None
        if ESTIMATORS[self.options.estimator].components:
            components = torch.from_numpy(component_rewards(self.groups, self.options.component_weights or {}))
        rewarded = RewardedSamples(self.rewards, self.group_ids, samples, self._of_objective(positions), components)
        found = None
        if (function := self.options.advantage_function) is not None:
            found = advantages_by(function, self.advantage_input(positions, kl, values), self.options)
        return token_estimates(rewarded, self.options, kl=kl, values=values, reverse_kl=reverse_kl, found=found)

    def advantage_input(self, positions: Tensor, kl: Tensor | None, values: Tensor | None) -> AdvantageInput:
        """A copy of what is known of the tokens of the objective, for the user's function.

        Args:
            positions: of all tokens among those of their samples ``[N]``.
            kl: of the tokens of the objective, where there is one.
            values: the same.
        """
        return AdvantageInput(
            rewards=self.rewards.clone(),
            group_ids=self.group_ids.clone(),
            samples=Segments(self._of_objective(self._samples.index).clone(), self._samples.count),
            positions=self._of_objective(positions).clone(),
            rollout_logprobs=self._of_objective(self.rollout).cpu().clone(),
            staleness=self._of_objective(self.staleness).cpu().clone(),
            kl=None if kl is None else kl.clone(),
            values=None if values is None else values.clone(),
            groups=self.groups,
            version=self.version,
        )

    def _of_objective(self, values: Tensor) -> Tensor:
        """Of all tokens ``[N]``, those of the objective."""
        return values if self._own is None else values[self._own.to(values.device)]

    def _among_all(self, values: Tensor) -> Tensor:
        """The opposite, with 0 for the others."""
        if self._own is None:
            return values
        return values.new_zeros(len(self._own)).masked_scatter(self._own, values)

    def _top_of_teacher(self, ordered: Sequence[TrainSequence]) -> Tensor | None:
        if not loss_of(self.options).needs_teacher_top or (self._own is not None and not bool(self._own.any())):
            return None
        top = teacher_top_of(ordered)
        found = None if top is None else torch.from_numpy(top.logprobs).to(self.device)
        if found is None or bool(self._of_objective(found).isnan().any()):
            raise UserFault(
                "learner.objective.policy_loss: divergence needs the likeliest tokens of a teacher, and samples of "
                "this batch came without; set teacher.top_logprobs, or train what a run with it has recorded"
            )
        return found

    def _kl_in_rewards(self) -> Tensor | None:
        if not rewards_need_kl(self.options):
            return None
        reference = self.opening.reference
        assert reference is not None, "kl_coef is not 0"
        return kl_estimate(self.options.kl_estimator, self._old(), reference)

    def _kl_to_teacher(self) -> Tensor | None:
        if not self.options.opd_kl_coef or (self._own is not None and not bool(self._own.any())):
            return None
        if self.teacher is None or bool(self._of_objective(self.teacher).isnan().any()):
            raise UserFault(
                "learner.objective.opd_kl_coef: samples of this batch came without the log-probs of a teacher; set it "
                "to 0, or train what a run with a teacher has recorded"
            )
        return sampled_reverse_kl(self._old(), self.teacher)

    def _old(self) -> Tensor:
        """Log-probs of the proximal policy before the first step ``[N]``, without gradient."""
        opening, empty = self.opening, self.rollout.new_zeros(0)
        assert opening.logprobs is not None or self.options.old_logprobs == "engine", "advantages_need_policy"
        tokens = PolicyTokens(
            logprobs=self.rollout if opening.logprobs is None else opening.logprobs,
            entropy=empty,
            rollout_logprobs=self.rollout,
            reference_logprobs=opening.reference,
            advantages=empty,
            weights=empty,
            figure_weights=empty,
            staleness=self.staleness,
            samples=self._samples,
        )
        return old_logprobs(tokens, self.options).detach()


def _teacher_of(sequences: Sequence[TrainSequence], device: torch.device) -> Tensor | None:
    """What the teacher said of all tokens of a batch, NaN where it was not asked; None where it never was."""
    if all(sequence.teacher_logprobs is None for sequence in sequences):
        return None
    parts = [
        np.full(len(s.trained), np.nan, dtype=np.float32) if s.teacher_logprobs is None else s.teacher_logprobs
        for s in sequences
    ]
    return torch.from_numpy(np.concatenate(parts)).to(device)


class ValueTerms(NamedTuple):
    """What the tokens of a micro-batch add to the step."""

    loss: Tensor
    """Scalar, with gradient."""
    figures: dict[str, Tensor]
    """Detached scalars by metric name."""


class ValueTargets(NamedTuple):
    """What the critic is trained on, float32 ``[N]``."""

    old_values: Tensor
    returns: Tensor
    weights: Tensor
    """The loss is ``Σ weight · value``, a mean."""

    def terms(self, values: Tensor, options: ObjectiveOptions) -> ValueTerms:
        """Loss and figures of these values ``[N]``."""
        bound = math.inf if options.value_clip is None else options.value_clip
        found = clipped_value_loss(values, self.old_values, self.returns, value_clip=bound)
        loss = (self.weights * found.loss).sum(dtype=torch.float64)
        clipped = (self.weights * found.clipped).sum(dtype=torch.float64)
        return ValueTerms(loss, {"train/value_loss": loss.detach(), "train/value_clipfrac": clipped})


class StepTokens:
    """The tokens of one optimizer step."""

    def __init__(
        self,
        known: BatchTokens,
        update: Update,
        parts: Sequence[Sequence[TrainSequence]],
        *,
        is_only_step: bool,
        reference_point: Tensor | None = None,
    ) -> None:
        """
        Args:
            known: of the whole batch.
            update: what is trained.
            parts: its sequences, or those of one rank, micro-batch by micro-batch.
            is_only_step: whether the policy that is trained is the one that opened the batch.
            reference_point: of KTO; None where there is nothing to find it from, and it is 0.
        """
        ordered = [sequence for part in parts for sequence in part]
        samples = _samples_of(ordered, update.num_samples)
        self._samples = Segments(samples.index.to(known.device), samples.count)
        weights, means = step_weights(update, known)
        means = means_by_loss(update, means)
        self._weights = self._samples.spread(weights.to(known.device))
        self._figure_weights = self._samples.spread(means.to(known.device))
        place = torch.from_numpy(joined([sequence.places for sequence in ordered])).to(known.device)
        self._places = place
        self._rollout, self._staleness = known.rollout[place], known.staleness[place]
        self._advantages = known.advantages[place]
        self._is_of_one_version = known.is_of_one_version[place]
        self._teacher, self._teacher_top = _at(known.teacher, place), _at(known.teacher_top, place)
        self._imitated, self._knows_rollout = _at(known.imitated, place), known.knows_rollout
        self._pairs = pairs_of(known, update)
        self._judged = judged_of(known, update, reference_point)
        opening = known.opening
        self.asks_reference = opening.reference is None
        """Whether the reference, if there is one, has not spoken yet."""
        self._reference = _at(opening.reference, place)
        self._predictions = None if is_only_step else _at(opening.logprobs, place)
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
            opening_logprobs=_at(self._predictions, part),
            teacher_logprobs=_at(self._teacher, part),
            teacher_top=_at(self._teacher_top, part),
            student_top=scores.top,
            pairs=self._pairs,
            judged=self._judged,
            knows_rollout=self._knows_rollout,
            is_of_one_version=self._is_of_one_version[part],
            imitated=_at(self._imitated, part),
            places=self._places[part],
        )

    def value_targets(self, part: slice) -> ValueTargets:
        """Of the tokens of a slice; for an estimator with a critic."""
        assert self._old_values is not None, "estimator: gae"
        assert self._returns is not None, "estimator: gae"
        weights = self._figure_weights[part]
        if self._imitated is not None:  # a demonstration has no reward to be predicted
            weights = weights * ~self._imitated[part]
        return ValueTargets(self._old_values[part], self._returns[part], weights)


def _flags(sequences: Sequence[TrainSequence], given: Sequence[bool]) -> Tensor:
    """Of each trained token, what is given of its sequence ``[N]``."""
    return torch.from_numpy(np.repeat(np.asarray(given, dtype=np.bool_), [len(s.trained) for s in sequences]))


def _samples_of(sequences: Sequence[TrainSequence], count: int) -> Segments:
    samples = np.asarray([s.sample for s in sequences], dtype=np.int64)
    index = np.repeat(samples, np.asarray([len(s.trained) for s in sequences], dtype=np.int64))
    return Segments(torch.from_numpy(index), count)


def _at(tensor: Tensor | None, place: Tensor | slice) -> Tensor | None:
    return None if tensor is None else tensor[place]
