"""One step of reinforcement learning: a batch of groups in, new weights and figures out.

Invariants:

* The weights of the reduction are fixed over the whole batch before it is split, and what couples its tokens is
  computed over all of them, so loss and gradient do not depend on the micro-batches.
* A batch without any trained token changes nothing, not even the optimizer's momentum.
"""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import torch

from penstock.backends.learners.metrics import as_metrics, batch_metrics
from penstock.backends.learners.objectives.objective import FRESH_DIFFERENCE, couples_tokens, finished
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.validity import is_user_objective
from penstock.backends.learners.packing import pack, split_into_micro_batches
from penstock.backends.learners.schedule import learning_rate
from penstock.backends.learners.sequences import read_groups
from penstock.backends.learners.torch.optimizer import MasterAdamW
from penstock.backends.learners.torch.step import Scores, StepTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.packing import PackedTokens
    from penstock.backends.learners.sequences import TrainBatch
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.messages.base import Metric
    from penstock.messages.samples import Group


MISMATCH_ALARM_NATS: Final = 0.1
"""Mean difference of log-probs, under the same weights, from which on engine and learner compute different models."""

_log: Final = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """What became of one batch."""

    num_trained_tokens: int
    num_masked_tokens: int
    step_time_s: float
    metrics: tuple[Metric, ...]


class PolicyTrainer:
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

        Raises:
            ValueError: the objective makes no sense.
            UserCodeError: its function cannot be loaded.
        """
        self._model = model
        self._options = options
        self._temperature = temperature
        self._num_steps = num_steps
        self._reference = reference
        self._check_stop = check_stop
        self._objective = open_objective(options.objective)
        self._entropy_gradient = options.objective.entropy_coef != 0.0 or is_user_objective(options.objective.name)
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
            warn_of_mismatch(figures, version=version)
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

    def accumulate(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """Add the gradient of the whole batch to the weights' gradients; returns the figures under ``train/``.

        Args:
            batch: with at least one trained token.
            version: of the policy as it is now.
        """
        objective = self._options.objective
        parts = split_into_micro_batches(batch.sequences, self._options.max_tokens_per_micro_batch)
        step = StepTokens(batch, parts, objective, version=version, device=self._model.device)
        packed = [pack(part) for part in parts]
        if len(parts) > 1 and couples_tokens(objective):
            totals = self._accumulate_coupled(packed, step)
        else:
            totals = self._accumulate_apart(packed, step)
        # One transfer for all of them: each would wait for the device on its own.
        values = cast("list[float]", torch.stack([value.double() for value in totals.values()]).tolist())
        return finished(dict(zip(totals, values, strict=True)))

    def _optimize(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        figures = self.accumulate(batch, version=step)
        rate = learning_rate(
            step,
            peak=self._options.learning_rate,
            warmup_steps=self._options.warmup_steps,
            num_steps=self._num_steps,
            schedule=self._options.lr_schedule,
        )
        norm = self._optimizer.step(rate, loss=figures["train/loss"], name=f"step {step + 1}")
        return {**figures, "train/grad_norm": norm, "train/lr-pg_0": rate}

    def _accumulate_apart(self, packed: Sequence[PackedTokens], step: StepTokens) -> dict[str, Tensor]:
        """Loss and gradient micro-batch by micro-batch, for a loss that is a sum over tokens (or one micro-batch)."""
        totals: dict[str, Tensor] = {}
        for part, tokens in zip(step.slices, packed, strict=True):
            self._check_stop()
            scores = self._scores(tokens, self._reference_logprobs(tokens))
            figures = step.estimate(scores)
            terms = self._objective(step.tokens(part, scores), self._options.objective)
            torch.autograd.backward(terms.loss)
            for name, value in {**terms.figures, **figures}.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def _accumulate_coupled(self, packed: Sequence[PackedTokens], step: StepTokens) -> dict[str, Tensor]:
        """Where the loss of a token depends on log-probs of others: a first pass without gradient finds all log-probs,
        the loss of the step gives its gradient with respect to each of them, and a second pass sends these back
        through the model. Exact for any function of the log-probs, at the cost of one more forward pass."""
        with torch.no_grad():
            parts: list[Scores] = []
            for tokens in packed:
                self._check_stop()
                parts.append(self._scores(tokens, self._reference_logprobs(tokens)))
            scores = Scores.joined(parts)
        figures = step.estimate(scores)
        leaves = [scores.logprobs.requires_grad_(), scores.entropy.requires_grad_()]
        terms = self._objective(step.tokens(slice(None), scores), self._options.objective)
        slopes = torch.autograd.grad(terms.loss, leaves, allow_unused=True, materialize_grads=True)
        for part, tokens in zip(step.slices, packed, strict=True):
            self._check_stop()
            again = self._scores(tokens, None)
            surrogate = (slopes[0][part] * again.logprobs).sum()
            if again.entropy.requires_grad:
                surrogate = surrogate + (slopes[1][part] * again.entropy).sum()
            torch.autograd.backward(surrogate)
        return {**terms.figures, **figures}

    def _scores(self, packed: PackedTokens, reference: Tensor | None) -> Scores:
        found = self._model.scores(packed, temperature=self._temperature, entropy_gradient=self._entropy_gradient)
        return Scores(logprobs=found.logprobs, entropy=found.entropy, reference=reference)

    @torch.no_grad()
    def _reference_logprobs(self, packed: PackedTokens) -> Tensor | None:
        if self._reference is None:
            return None
        return self._reference.logprobs(packed, temperature=self._temperature)


def warn_of_mismatch(figures: Mapping[str, float], *, version: int) -> None:
    """Sound the alarm where engine and learner differ on tokens that the trained weights themselves have made.

    Older tokens differ because the policy has moved on, so they say nothing here.
    """
    difference = figures.get(FRESH_DIFFERENCE, 0.0)
    if difference > MISMATCH_ALARM_NATS:
        _log.warning(
            "step %d: the log-probs of engine and learner differ by %.3f nats a token (expected: at most %g) on tokens "
            "made by the weights that are trained, so the engine computes another model than the learner; compare "
            "sampling.temperature, top_p, model.dtype and the tokenizer of both, or set learner.objective.old_logprobs="
            "recompute to correct for it",
            version,
            difference,
            MISMATCH_ALARM_NATS,
        )
