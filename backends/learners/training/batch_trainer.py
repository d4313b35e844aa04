"""One batch of reinforcement learning: groups in, new weights and figures out, by one optimizer step or several.

Whatever runs the models is an :class:`UpdateTrainer`; what is here is the same for all of them.

Invariants:

* Every rank is given every batch, whole, and all end with the same figures.
* Which samples come together in which step is a function of seed, version and pass.
* A batch without any trained token changes nothing, not even the optimizer's momentum.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.batch.updates import divide_batch
from penstock.backends.learners.hooks.agreement import check_agreement
from penstock.backends.learners.hooks.batches import BatchHooks
from penstock.backends.learners.learning_rate import critic_learning_rate, policy_learning_rate
from penstock.backends.learners.objectives.figures import BatchFigures
from penstock.backends.learners.objectives.validity import compares_rewards
from penstock.backends.learners.training.alarms import Alarms
from penstock.backends.learners.training.metrics import as_metrics, batch_metrics
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.training.flops import Speed
    from penstock.backends.learners.training.step import BatchTokens
    from penstock.backends.learners.worker_group.workers import WorkerGroup
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


class UpdateWork(NamedTuple):
    """One optimizer step that is to be made ready."""

    batch: TrainBatch
    first_pass: Sequence[Update]
    """All updates of the first pass over the batch, by whose micro-batches it is opened."""
    update: Update
    known: BatchTokens | None
    """What was found when the batch was opened; None: that has not been done."""
    version: int
    """Of the policy that opens the batch."""
    is_only: bool
    """Whether the batch is one optimizer step."""
    trains_policy: bool


class Added(NamedTuple):
    """What came of the gradients of one optimizer step."""

    known: BatchTokens
    totals: dict[str, float]
    """Sums over its tokens, the same on every rank."""


class UpdateTrainer(Protocol):
    """Owns models and optimizers."""

    def check_length(self, sequence: TrainSequence, what: str, /) -> None:
        """
        Raises:
            UserFault: the sequence is longer than the model's context.
        """
        ...

    def add(self, work: UpdateWork, /) -> Added:
        """Open the batch, if that has not been done, and add the gradients of an update."""
        ...

    def change(self, totals: Mapping[str, float], *, step: int, name: str) -> dict[str, float]:
        """Apply the gradients; the norms that they had.

        Args:
            totals: of the update, as ``add`` gave them.
            step: batches before this one.
            name: of the optimizer step, for messages.

        Raises:
            DivergedError: loss or gradient is not finite; that optimizer step has not changed the weights.
        """
        ...


class BatchTrainer:
    """Reads batches, divides them into updates, and collects the figures."""

    def __init__(
        self,
        trainer: UpdateTrainer,
        options: LearnerOptions,
        *,
        num_steps: int,
        seed: int,
        dtype: str,
        speed: Speed,
        workers: WorkerGroup = SOLO,
    ) -> None:
        """
        Args:
            trainer: what makes the optimizer steps.
            options: the ``learner:`` block.
            num_steps: of the whole run, for the schedule.
            seed: of the order in which a batch is gone through, where it is divided.
            dtype: that the model computes in.
            speed: of its steps.
            worker group: all ranks; each has such a trainer, and they are called alike.

        Raises:
            UserCodeError: a hook cannot be loaded.
        """
        self._trainer = trainer
        self._options = options
        self._num_steps = num_steps
        self._seed = seed
        self._speed = speed
        self._alarms = Alarms(options, dtype)
        self._workers = workers
        self._hooks = BatchHooks(options, workers)

    def train(
        self, groups: Sequence[Group], *, version: int, min_token_version: int, mask_old_tokens: bool = False
    ) -> StepResult:
        """Train one batch, which makes ``version`` (the first batch makes 1).

        Raises:
            UserFault: a sample has a reward that is not finite, or is longer than the model's context.
            UserCodeError: a function of the user's failed, or returned what cannot be used.
            DivergedError: see :meth:`UpdateTrainer.change`.
        """
        started_s = time.perf_counter()
        batch = read_groups(groups, min_token_version=min_token_version, mask_old_tokens=mask_old_tokens)
        batch = self._hooks.prepared(batch, version=version - 1)
        for sequence in batch.sequences:
            self._trainer.check_length(sequence, "a sample")
        figures = {**batch_metrics(groups), "train/num_tokens": float(batch.num_trained_tokens)}
        figures |= self._hooks.figures_of(batch)
        figures |= self._hooks.log_rollout(groups, figures, version=version)
        if batch.sequences:
            figures |= self._optimize(batch, step=version - 1)
        notices = self._alarms.hear(figures, version=version)
        step_time_s = time.perf_counter() - started_s
        figures |= self._speed.figures(batch.sequences, step_time_s)
        figures |= self._hooks.log_step(groups, figures, version=version, step_time_s=step_time_s)
        return StepResult(
            num_trained_tokens=batch.num_trained_tokens,
            num_masked_tokens=batch.num_masked_tokens,
            step_time_s=step_time_s,
            metrics=as_metrics(figures),
            notices=notices,
        )

    def _optimize(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        options = self._options
        passes = [self._divided(batch, step, index) for index in range(options.num_passes)]
        updates = [update for part in passes for update in part]
        trains_policy = step >= options.objective.critic_only_steps
        # Figures are means over tokens where the user weighs, as they are where the loss is a sum over a constant.
        has_function = options.objective.reduction_function is not None
        reported = BatchFigures("constant" if has_function else options.objective.reduction)
        known: BatchTokens | None = None
        for number, update in enumerate(updates, start=1):
            is_only = len(updates) == 1
            found = self._trainer.add(UpdateWork(batch, passes[0], update, known, step, is_only, trains_policy))
            if known is None and found.known.user_values is not None:
                check_agreement(
                    self._workers, found.known.user_values, "learner.objective: what its functions returned"
                )
            known = found.known
            name = f"step {step + 1}" if is_only else f"step {step + 1}, update {number} of {len(updates)}"
            reported.add(found.totals | self._trainer.change(found.totals, step=step, name=name), update)
        figures = {} if known is None else known.figures()
        figures |= reported.result()
        if trains_policy:
            figures["train/lr-pg_0"] = policy_learning_rate(step, options, num_steps=self._num_steps)
        if options.objective.critic != "none":
            figures["train/critic-lr-pg_0"] = critic_learning_rate(step, options, num_steps=self._num_steps)
        return figures

    def _divided(self, batch: TrainBatch, step: int, index: int) -> list[Update]:
        by_sample = not compares_rewards(self._options.objective)
        draw = random.Random(f"updates {self._seed} {step} {index}")
        return divide_batch(batch, self._options.num_updates, by_sample=by_sample, draw=draw)
