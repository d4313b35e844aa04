"""One step of reinforcement learning: a batch of groups in, new weights and figures out.

Invariants:

* The weights of the reduction are fixed over the whole batch before it is split, so loss and gradient do not depend
  on the micro-batches.
* A batch without any trained token changes nothing, not even the optimizer's momentum.
"""

# torch.from_numpy and Tensor.tolist are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from penstock.backends.learners.metrics import as_metrics, batch_metrics
from penstock.backends.learners.objectives.advantages import group_normalized_advantages
from penstock.backends.learners.objectives.grpo import PolicyTokens, grpo_objective
from penstock.backends.learners.objectives.reduction import reduction_weights
from penstock.backends.learners.packing import pack, split_into_micro_batches
from penstock.backends.learners.schedule import learning_rate
from penstock.backends.learners.sequences import read_groups
from penstock.backends.learners.torch.optimizer import MasterAdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.objectives.grpo import ObjectiveTerms
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.packing import PackedTokens
    from penstock.backends.learners.sequences import TrainBatch
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.messages.base import Metric
    from penstock.messages.samples import Group


class StepResult(NamedTuple):
    """What became of one batch."""

    num_trained_tokens: int
    num_masked_tokens: int
    step_time_s: float
    metrics: tuple[Metric, ...]


class SampleTerms(NamedTuple):
    """Constants of the step for the tokens of each sample, float32 ``[S]``."""

    advantages: Tensor
    weights: Tensor


class GrpoTrainer:
    """Owns the optimizer of the policy; the weights belong to ``model``."""

    def __init__(
        self,
        model: PackedModel,
        options: LearnerOptions,
        *,
        temperature: float,
        num_steps: int,
        reference: PackedModel | None,
        check_stop: Callable[[], None],
    ) -> None:
        """
        Args:
            model: what is trained.
            options: the ``learner:`` block.
            temperature: of the sampling, so that log-probs are of the distribution that was sampled from.
            num_steps: of the whole run, for the schedule.
            reference: the policy that the KL term pulls to; None where ``kl_coef`` is 0.
            check_stop: called before each micro-batch; raises to end the step.
        """
        self._model = model
        self._options = options
        self._temperature = temperature
        self._num_steps = num_steps
        self._reference = reference
        self._check_stop = check_stop
        self._optimizer = MasterAdamW(
            model.model,
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        )

    def train(self, groups: Sequence[Group], *, version: int, min_token_version: int) -> StepResult:
        """Train one batch, which makes ``version`` (the first step makes 1).

        Raises:
            ValueError: a sample has no reward or is longer than the model's context.
            NonFiniteStepError: loss or gradient is not finite; the weights are as they were.
        """
        started_s = time.perf_counter()
        batch = read_groups(groups, min_token_version=min_token_version)
        for sequence in batch.sequences:
            self._model.check_length(sequence, "a sample")
        figures = {**batch_metrics(groups), "train/num_tokens": float(batch.num_trained_tokens)}
        if batch.sequences:
            figures |= self._optimize(batch, step=version - 1)
        step_time_s = time.perf_counter() - started_s
        num_tokens = sum(len(sequence.tokens) for sequence in batch.sequences)
        figures["perf/actor_train_time"] = step_time_s
        figures["perf/actor_train_tok_per_s"] = num_tokens / step_time_s
        return StepResult(
            num_trained_tokens=batch.num_trained_tokens,
            num_masked_tokens=batch.num_masked_tokens,
            step_time_s=step_time_s,
            metrics=as_metrics(figures),
        )

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on beside the model and the version; see :meth:`.MasterAdamW.state`."""
        return self._optimizer.state()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; see :meth:`.MasterAdamW.restore`."""
        self._optimizer.restore(tensors)

    def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        """Add the gradient of the whole batch to the weights' gradients; returns the figures under ``train/``."""
        terms = self._sample_terms(batch)
        totals: dict[str, Tensor] = {}
        for part in split_into_micro_batches(batch.sequences, self._options.max_tokens_per_micro_batch):
            self._check_stop()
            added = self._micro_batch(pack(part), terms)
            torch.autograd.backward(added.loss)
            for name, value in added.figures.items():
                totals[name] = totals[name] + value if name in totals else value
        # One transfer for all of them: each would wait for the device on its own.
        values = cast("list[float]", torch.stack(list(totals.values())).tolist())
        return dict(zip(totals, values, strict=True))

    def _optimize(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        figures = self.accumulate(batch)
        rate = learning_rate(
            step,
            peak=self._options.learning_rate,
            warmup_steps=self._options.warmup_steps,
            num_steps=self._num_steps,
            schedule=self._options.lr_schedule,
        )
        norm = self._optimizer.step(rate, loss=figures["train/loss"], name=f"step {step + 1}")
        return {**figures, "train/grad_norm": norm, "train/lr-pg_0": rate}

    def _micro_batch(self, packed: PackedTokens, terms: SampleTerms) -> ObjectiveTerms:
        sample_of = self._model.tensor(packed.sample_of)
        scores = self._model.scores(
            packed,
            temperature=self._temperature,
            entropy_gradient=self._options.objective.entropy_coef != 0.0,
        )
        tokens = PolicyTokens(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            rollout_logprobs=self._model.tensor(packed.rollout_logprobs),
            reference_logprobs=self._reference_logprobs(packed),
            advantages=terms.advantages[sample_of],
            weights=terms.weights[sample_of],
        )
        return grpo_objective(tokens, self._options.objective)

    @torch.no_grad()
    def _reference_logprobs(self, packed: PackedTokens) -> Tensor | None:
        if self._reference is None:
            return None
        return self._reference.logprobs(packed, temperature=self._temperature)

    def _sample_terms(self, batch: TrainBatch) -> SampleTerms:
        objective = self._options.objective
        advantages = group_normalized_advantages(
            torch.from_numpy(batch.rewards),
            torch.from_numpy(batch.group_ids),
            normalize_std=objective.normalize_std,
        )
        weights = reduction_weights(objective.reduction, torch.from_numpy(batch.tokens_per_sample()))
        return SampleTerms(advantages=advantages.float().to(self._model.device), weights=weights.to(self._model.device))
