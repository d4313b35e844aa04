"""One batch of reinforcement learning: groups in, new weights and figures out, by one optimizer step or several.

Invariants:

* The weights of the reduction are fixed over a whole step before it is split, and what couples its tokens is computed
  over all of them, so loss and gradient do not depend on the micro-batches.
* Advantages, returns and the log-probs of the policy that opened the batch are found once, before its first step, with
  the very micro-batches of the first pass: a policy that has not moved yet is at a distance of exactly 0.
* Which samples come together in which step is a function of seed, version and pass.
* A batch without any trained token changes nothing, not even the optimizer's momentum.
"""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch

from penstock.backends.learners.metrics import as_metrics, batch_metrics
from penstock.backends.learners.objectives.figures import BatchFigures
from penstock.backends.learners.objectives.objective import FRESH_DIFFERENCE, couples_tokens, finished, rewards_need_kl
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.validity import GROUPED, is_user_objective
from penstock.backends.learners.packing import pack, split_into_micro_batches
from penstock.backends.learners.schedule import learning_rate
from penstock.backends.learners.sequences import read_groups
from penstock.backends.learners.torch.critic import Critic
from penstock.backends.learners.torch.optimizer import MasterAdamW
from penstock.backends.learners.torch.step import BatchTokens, Opening, Scores, StepTokens
from penstock.backends.learners.updates import divide_batch, whole_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.packing import PackedTokens
    from penstock.backends.learners.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.updates import Update
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
    """Owns the optimizer of the policy, whose weights belong to ``model``, and the critic."""

    def __init__(
        self,
        model: PackedModel,
        options: LearnerOptions,
        *,
        temperature: float,
        num_steps: int,
        reference: PackedModel | None,
        check_stop: Callable[[], None],
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: what is trained.
            options: the ``learner:`` block.
            temperature: of the sampling, so that log-probs are of the distribution that was sampled from.
            num_steps: of the whole run, for the schedule.
            reference: the policy that the KL term pulls to; None where ``kl_coef`` is 0.
            check_stop: called before each micro-batch; raises to end the step.
            seed: of the order in which a batch is gone through, where it is divided.

        Raises:
            CheckpointError: the model cannot have such a critic.
            ValueError: the objective makes no sense.
            UserCodeError: its function cannot be loaded.
        """
        self._model = model
        self._options = options
        self._temperature = temperature
        self._num_steps = num_steps
        self._reference = reference
        self._check_stop = check_stop
        self._seed = seed
        self._objective = open_objective(options.objective, num_steps=options.num_updates * options.num_passes)
        self._entropy_gradient = options.objective.entropy_coef != 0.0 or is_user_objective(options.objective.name)
        self._critic = None if options.objective.critic == "none" else Critic(model, options, num_steps=num_steps)
        self._optimizer = MasterAdamW(
            model.model,
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        )

    def train(self, groups: Sequence[Group], *, version: int, min_token_version: int) -> StepResult:
        """Train one batch, which makes ``version`` (the first batch makes 1).

        Raises:
            ValueError: a sample has no reward or is longer than the model's context.
            NonFiniteStepError: loss or gradient is not finite; that optimizer step has not changed the weights.
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
        """What the next step depends on beside the model and the version; see :meth:`.MasterAdamW.state` and
        :meth:`.Critic.state`."""
        return self._optimizer.state() | ({} if self._critic is None else self._critic.state())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; see :meth:`.MasterAdamW.restore` and :meth:`.Critic.restore`."""
        self._optimizer.restore(tensors)
        if self._critic is not None:
            self._critic.restore(tensors)

    def accumulate(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """Add the gradient of the whole batch, as one step, to the gradients of policy and critic; returns the figures
        under ``train/``.

        Args:
            batch: with at least one trained token.
            version: of the policy as it is now.
        """
        update = whole_batch(batch)
        known = self._known(batch, [update], version=version)
        totals = self._accumulate(known, update, is_only_step=True, trains_policy=True)
        return {**known.figures(), **finished(totals)}

    def _optimize(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        options = self._options
        passes = [self._divided(batch, step, index) for index in range(options.num_passes)]
        updates = [update for part in passes for update in part]
        known = self._known(batch, passes[0], version=step)
        trains_policy = step >= options.objective.critic_only_steps
        reported = BatchFigures(options.objective.reduction)
        for number, update in enumerate(updates, start=1):
            totals = self._accumulate(known, update, is_only_step=len(updates) == 1, trains_policy=trains_policy)
            name = f"step {step + 1}" if len(updates) == 1 else f"step {step + 1}, update {number} of {len(updates)}"
            reported.add(totals | self._change(totals, step, name), update)
        figures = {**known.figures(), **reported.result()}
        if trains_policy:
            figures["train/lr-pg_0"] = self._learning_rate(step)
        if self._critic is not None:
            figures["train/critic-lr-pg_0"] = self._critic.learning_rate(step)
        return figures

    def _divided(self, batch: TrainBatch, step: int, index: int) -> list[Update]:
        by_sample = self._options.objective.estimator not in GROUPED
        draw = random.Random(f"updates {self._seed} {step} {index}")
        return divide_batch(batch, self._options.num_updates, by_sample=by_sample, draw=draw)

    def _change(self, totals: Mapping[str, float], step: int, name: str) -> dict[str, float]:
        """Apply the gradients; the norms that they had."""
        norms: dict[str, float] = {}
        if self._critic is not None:
            norms["train/critic-grad_norm"] = self._critic.step(step, loss=totals["train/value_loss"], name=name)
        if "train/loss" in totals:
            norms["train/grad_norm"] = self._optimizer.step(
                self._learning_rate(step), loss=totals["train/loss"], name=name
            )
        return norms

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step,
            peak=self._options.learning_rate,
            warmup_steps=self._options.warmup_steps,
            num_steps=self._num_steps,
            schedule=self._options.lr_schedule,
        )

    def _known(self, batch: TrainBatch, updates: Sequence[Update], *, version: int) -> BatchTokens:
        opening = self._open(updates)
        return BatchTokens(batch, self._options.objective, opening, version=version, device=self._model.device)

    @torch.no_grad()
    def _open(self, updates: Sequence[Update]) -> Opening:
        """What the models say before the first step, as far as anything depends on it.

        Args:
            updates: of the first pass; together they are the batch.
        """
        options, critic = self._options.objective, self._critic
        is_moving = self._options.num_updates * self._options.num_passes > 1
        needs_policy = rewards_need_kl(options) or (is_moving and options.old_logprobs != "engine")
        found: dict[str, list[Tensor]] = {}
        places: list[Tensor] = []
        for part in self._micro_batches(updates) if needs_policy or critic is not None else ():
            self._check_stop()
            tokens = pack(part)
            places.append(torch.from_numpy(np.concatenate([sequence.places for sequence in part])))
            hidden = None
            if needs_policy or (critic is not None and critic.is_shared):
                scores = self._scores(tokens, with_reference=needs_policy)
                hidden = scores.hidden
                if needs_policy:
                    found.setdefault("logprobs", []).append(scores.logprobs)
                if scores.reference is not None:
                    found.setdefault("reference", []).append(scores.reference)
            if critic is not None:
                found.setdefault("values", []).append(critic.values(tokens, hidden))
        order = torch.cat(places).to(self._model.device).argsort() if places else None
        return Opening(**{name: torch.cat(values)[order] for name, values in found.items()})

    def _micro_batches(self, updates: Sequence[Update]) -> list[list[TrainSequence]]:
        size = self._options.max_tokens_per_micro_batch
        return [part for update in updates for part in split_into_micro_batches(update.sequences, size)]

    def _accumulate(
        self, known: BatchTokens, update: Update, *, is_only_step: bool, trains_policy: bool
    ) -> dict[str, float]:
        """Add the gradients of an update; the sums over its tokens."""
        parts = self._micro_batches([update])
        step = StepTokens(known, update, parts, is_only_step=is_only_step)
        packed = [pack(part) for part in parts]
        if not trains_policy:
            totals = self._accumulate_values(packed, step)
        elif len(parts) > 1 and couples_tokens(self._options.objective):
            totals = self._accumulate_coupled(packed, step)
        else:
            totals = self._accumulate_apart(packed, step)
        # One transfer for all of them: each would wait for the device on its own.
        values = cast("list[float]", torch.stack([value.double() for value in totals.values()]).tolist())
        return dict(zip(totals, values, strict=True))

    def _accumulate_apart(self, packed: Sequence[PackedTokens], step: StepTokens) -> dict[str, Tensor]:
        """Loss and gradient micro-batch by micro-batch, for a loss that is a sum over tokens (or one micro-batch)."""
        totals: dict[str, Tensor] = {}
        for part, tokens in zip(step.slices, packed, strict=True):
            self._check_stop()
            scores = self._scores(tokens, with_reference=step.asks_reference)
            terms = self._objective(step.tokens(part, scores), self._options.objective)
            figures = self._backward(terms.loss, tokens, part, step, scores.hidden)
            _add(totals, {**terms.figures, **figures})
        return totals

    def _accumulate_coupled(self, packed: Sequence[PackedTokens], step: StepTokens) -> dict[str, Tensor]:
        """Where the loss of a token depends on log-probs of others: a first pass without gradient finds all log-probs,
        the loss of the step gives its gradient with respect to each of them, and a second pass sends these back
        through the model. Exact for any function of the log-probs, at the cost of one more forward pass."""
        with torch.no_grad():
            parts: list[Scores] = []
            for tokens in packed:
                self._check_stop()
                found = self._scores(tokens, with_reference=step.asks_reference)
                parts.append(found._replace(hidden=None))
            scores = Scores.joined(parts)
        leaves = [scores.logprobs.requires_grad_(), scores.entropy.requires_grad_()]
        terms = self._objective(step.tokens(slice(None), scores), self._options.objective)
        slopes = torch.autograd.grad(terms.loss, leaves, allow_unused=True, materialize_grads=True)
        totals: dict[str, Tensor] = {}
        for part, tokens in zip(step.slices, packed, strict=True):
            self._check_stop()
            again = self._scores(tokens, with_reference=False)
            surrogate = (slopes[0][part] * again.logprobs).sum()
            if again.entropy.requires_grad:
                surrogate = surrogate + (slopes[1][part] * again.entropy).sum()
            _add(totals, self._backward(surrogate, tokens, part, step, again.hidden))
        return {**terms.figures, **totals}

    def _accumulate_values(self, packed: Sequence[PackedTokens], step: StepTokens) -> dict[str, Tensor]:
        """The critic alone; with a shared trunk its head alone, as the trunk is the policy's."""
        critic, totals = self._critic, dict[str, torch.Tensor]()
        assert critic is not None, "critic_only_steps"
        for part, tokens in zip(step.slices, packed, strict=True):
            self._check_stop()
            hidden = None
            if critic.is_shared:
                with torch.no_grad():
                    hidden = self._scores(tokens, with_reference=False).hidden
            terms = critic.terms(tokens, hidden, step.value_targets(part))
            torch.autograd.backward(terms.loss)
            _add(totals, terms.figures)
        return totals

    def _backward(
        self, loss: Tensor, tokens: PackedTokens, part: slice, step: StepTokens, hidden: Tensor | None
    ) -> dict[str, Tensor]:
        """Send the loss of the policy back through it, and that of the values; the figures of these."""
        critic = self._critic
        if critic is None or not critic.is_shared:
            torch.autograd.backward(loss)
        if critic is None:
            return {}
        terms = critic.terms(tokens, hidden, step.value_targets(part))
        if critic.is_shared:
            torch.autograd.backward(loss + self._options.objective.value_coef * terms.loss)
        else:
            torch.autograd.backward(terms.loss)
        return terms.figures

    def _scores(self, packed: PackedTokens, *, with_reference: bool) -> Scores:
        found = self._model.scores(
            packed,
            temperature=self._temperature,
            entropy_gradient=self._entropy_gradient,
            wants_hidden=self._critic is not None and self._critic.is_shared,
        )
        reference = None
        if with_reference and self._reference is not None:
            with torch.no_grad():
                reference = self._reference.logprobs(packed, temperature=self._temperature)
        return Scores(logprobs=found.logprobs, entropy=found.entropy, reference=reference, hidden=found.hidden)


def _add(totals: dict[str, Tensor], figures: Mapping[str, Tensor]) -> None:
    for name, value in figures.items():
        totals[name] = totals[name] + value if name in totals else value


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
