"""One batch of reinforcement learning: groups in, new weights and figures out, by one optimizer step or several.

Invariants:

* Loss, gradient and figures are those of the whole batch, whatever its micro-batches and the ranks are
  (:mod:`.accumulation`, :mod:`.opening`).
* Every rank is given every batch, whole; each runs its own micro-batches, and all end with the same figures.
* Which samples come together in which step is a function of seed, version and pass.
* A batch without any trained token changes nothing, not even the optimizer's momentum.
* Micro-batches that memory does not suffice for are tried anew at half the size, and so are all after them.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.learners.alarms import Alarms
from penstock.backends.learners.division import divide_over_ranks
from penstock.backends.learners.gang.gang import SOLO
from penstock.backends.learners.metrics import as_metrics, batch_metrics
from penstock.backends.learners.objectives.figures import BatchFigures
from penstock.backends.learners.objectives.objective import finished
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.validity import compares_rewards, is_user_objective
from penstock.backends.learners.schedule import learning_rate
from penstock.backends.learners.sequences import read_groups
from penstock.backends.learners.step import BatchTokens
from penstock.backends.learners.torch.accumulation import Accumulation, Step
from penstock.backends.learners.torch.collectives import Collectives
from penstock.backends.learners.torch.critic import Critic
from penstock.backends.learners.torch.micro_batch import laid_out, nothing
from penstock.backends.learners.torch.model import ADAPTER_PREFIX, CheckpointError
from penstock.backends.learners.torch.models import Models
from penstock.backends.learners.torch.opening import open_batch
from penstock.backends.learners.torch.optimizer import MasterAdamW
from penstock.backends.learners.torch.rounds import MicroBatchSize, OutOfMemoryError, Rounds
from penstock.backends.learners.torch.speed import DTYPE_NAMES, speed_of
from penstock.backends.learners.updates import divide_batch, whole_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.division import Division
    from penstock.backends.learners.gang.gang import Gang
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.sequences import TrainBatch
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.updates import Update
    from penstock.messages.base import Metric
    from penstock.messages.samples import Group


class StepResult(NamedTuple):
    """What became of one batch."""

    num_trained_tokens: int
    num_masked_tokens: int
    step_time_s: float
    metrics: tuple[Metric, ...]
    notices: tuple[str, ...] = ()
    """What people should know about it."""


class _Added(NamedTuple):
    known: BatchTokens
    totals: dict[str, float]


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
        gang: Gang = SOLO,
    ) -> None:
        """
        Args:
            model: what is trained, already divided over the ranks, as the reference is (:func:`.parallelize`).
            options: the ``learner:`` block.
            temperature: of the sampling, so that log-probs are of the distribution that was sampled from.
            num_steps: of the whole run, for the schedule.
            reference: the policy that the KL term pulls to; None where ``kl_coef`` is 0.
            check_stop: called before each micro-batch; raises to end the step.
            seed: of the order in which a batch is gone through, where it is divided.
            gang: all ranks; each has such a trainer, and they are called alike.

        Raises:
            CheckpointError: the model cannot have such a critic.
            ValueError: the objective makes no sense.
            UserCodeError: its function cannot be loaded.
        """
        self._options = options
        self._num_steps = num_steps
        self._seed = seed
        self._gang = gang
        objective = open_objective(options.objective, num_steps=options.num_updates * options.num_passes)
        has_critic = options.objective.critic != "none"
        self._critic = Critic(model, options, num_steps=num_steps, gang=gang) if has_critic else None
        self._optimizer = MasterAdamW(
            model.model,
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            compute_dtype=model.dtype,
            gang=gang,
        )
        self._optimizers: list[MasterAdamW | Critic] = [self._optimizer]
        if self._critic is not None:
            self._optimizers.append(self._critic)
        self._models = Models(
            policy=model,
            reference=reference,
            critic=self._critic,
            temperature=temperature,
            entropy_gradient=options.objective.entropy_coef != 0.0 or is_user_objective(options.objective.name),
        )
        self._rounds = Rounds(gang, Collectives(self._models.roots), check_stop)
        self._accumulation = Accumulation(self._models, objective, options, self._rounds, gang)
        self._alarms = Alarms(options, DTYPE_NAMES.get(model.dtype, str(model.dtype)))
        self._speed = speed_of(model, options, num_ranks=gang.num_ranks)
        self._size = MicroBatchSize(options.max_tokens_per_micro_batch, is_speaker=gang.is_first)

    def train(self, groups: Sequence[Group], *, version: int, min_token_version: int) -> StepResult:
        """Train one batch, which makes ``version`` (the first batch makes 1).

        Raises:
            ValueError: a sample has no reward or is longer than the model's context.
            NonFiniteStepError: loss or gradient is not finite; that optimizer step has not changed the weights.
        """
        started_s = time.perf_counter()
        batch = read_groups(groups, min_token_version=min_token_version)
        for sequence in batch.sequences:
            self._models.policy.check_length(sequence, "a sample")
        figures = {**batch_metrics(groups), "train/num_tokens": float(batch.num_trained_tokens)}
        if batch.sequences:
            figures |= self._optimize(batch, step=version - 1)
        notices = self._alarms.hear(figures, version=version)
        step_time_s = time.perf_counter() - started_s
        figures |= self._speed.figures(batch.sequences, step_time_s)
        return StepResult(
            num_trained_tokens=batch.num_trained_tokens,
            num_masked_tokens=batch.num_masked_tokens,
            step_time_s=step_time_s,
            metrics=as_metrics(figures),
            notices=notices,
        )

    @property
    def max_tokens_per_micro_batch(self) -> int:
        """As it was found to fit."""
        return self._size.max_tokens

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on beside the model and the version; see :meth:`.MasterAdamW.state`,
        :meth:`.Critic.state` and :meth:`.Adapters.state`."""
        adapters = self._models.policy.adapters
        of_policy = self._optimizer.state() | ({} if adapters is None else adapters.state())
        return of_policy | ({} if self._critic is None else self._critic.state())

    def layouts(self) -> dict[str, Tensor]:
        """Where and how what ``state`` has is divided over ranks; see :meth:`.MasterAdamW.layouts`."""
        return self._optimizer.layouts() | ({} if self._critic is None else self._critic.layouts())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; see :meth:`.MasterAdamW.restore` and :meth:`.Critic.restore`."""
        if self._models.policy.adapters is not None:
            self._models.policy.adapters.restore(tensors)
        elif any(name.startswith(ADAPTER_PREFIX) for name in tensors):
            raise CheckpointError(
                "the checkpoint was written with learner.lora, and its optimizer knows adapters only; resume with it, "
                "or start a new run from the checkpoint's model, which has them added in (model.path)"
            )
        self._optimizer.restore(tensors)
        if self._critic is not None:
            self._critic.restore(tensors)

    def accumulate(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """Add the gradient of the whole batch, as one step, to the gradients of policy and critic, on every rank that
        of all ranks; returns the figures under ``train/``.

        Args:
            batch: with at least one trained token.
            version: of the policy as it is now.
        """
        update = whole_batch(batch)
        found = self._add(batch, [update], update, None, version=version, is_only=True, trains_policy=True)
        for optimizer in self._optimizers:
            optimizer.sum_gradients()
        return {**found.known.figures(), **finished(found.totals)}

    def trained_weights(self) -> list[Tensor]:
        """Of the policy, as the optimizer changes them, with their gradients."""
        return self._optimizer.weights()

    def forget_gradients(self) -> None:
        """Those of policy and critic."""
        for optimizer in self._optimizers:
            optimizer.forget_gradients()

    def _optimize(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        options = self._options
        passes = [self._divided(batch, step, index) for index in range(options.num_passes)]
        updates = [update for part in passes for update in part]
        trains_policy = step >= options.objective.critic_only_steps
        reported = BatchFigures(options.objective.reduction)
        known: BatchTokens | None = None
        for number, update in enumerate(updates, start=1):
            is_only = len(updates) == 1
            found = self._add(
                batch, passes[0], update, known, version=step, is_only=is_only, trains_policy=trains_policy
            )
            known = found.known
            name = f"step {step + 1}" if is_only else f"step {step + 1}, update {number} of {len(updates)}"
            reported.add(found.totals | self._change(found.totals, step, name), update)
        figures = {} if known is None else known.figures()
        figures |= reported.result()
        if trains_policy:
            figures["train/lr-pg_0"] = self._learning_rate(step)
        if self._critic is not None:
            figures["train/critic-lr-pg_0"] = self._critic.learning_rate(step)
        return figures

    def _add(
        self,
        batch: TrainBatch,
        first_pass: Sequence[Update],
        update: Update,
        known: BatchTokens | None,
        *,
        version: int,
        is_only: bool,
        trains_policy: bool,
    ) -> _Added:
        """Open the batch, if that has not been done, and add the gradients of an update; with smaller micro-batches
        if memory does not suffice, and then the opening anew as well, as it has to be of the same ones."""
        while True:
            divisions = [self._division(update)]
            try:
                opened = self._open(batch, first_pass, version=version) if known is None else known
                totals = self._accumulation.add(
                    Step(opened, update, divisions[0], is_only=is_only), trains_policy=trains_policy
                )
            except OutOfMemoryError:
                divisions += [self._division(other) for other in first_pass] if known is None else []
            else:
                self._size.worked(step=version + 1)
                return _Added(opened, totals)
            self.forget_gradients()
            self._size.halve(can_be_finer=not all(division.is_finest for division in divisions))

    def _open(self, batch: TrainBatch, first_pass: Sequence[Update], *, version: int) -> BatchTokens:
        parts = [part for update in first_pass for part in self._division(update).ranks[self._gang.rank]]
        spare = batch.sequences[0]
        opening = open_batch(
            self._models,
            laid_out(parts, spare),
            nothing(spare),
            self._rounds,
            self._gang,
            self._options,
            num_tokens=batch.num_trained_tokens,
        )
        return BatchTokens(batch, self._options.objective, opening, version=version, device=self._models.policy.device)

    def _divided(self, batch: TrainBatch, step: int, index: int) -> list[Update]:
        by_sample = not compares_rewards(self._options.objective)
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
            final_fraction=self._options.min_learning_rate_ratio,
        )

    def _division(self, update: Update) -> Division:
        return divide_over_ranks(
            update.sequences,
            num_ranks=self._gang.num_ranks,
            max_tokens=self._size.max_tokens,
            hidden_size=self._models.policy.hidden_size,
        )
