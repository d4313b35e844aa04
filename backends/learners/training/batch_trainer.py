"""One batch of reinforcement learning: groups in, new weights and figures out, by one optimizer step or several.

What is here is the same for all learners; how the models are run is a subclass of :class:`BatchTrainer`.

Invariants:

* Every rank is given every batch, whole, and all end with the same figures.
* Which samples come together in which step is a function of seed, version and pass.
* A batch without any trained token changes nothing, not even the optimizer's momentum.
* Micro-batches that memory does not suffice for are tried anew at half the size, and so are all after them. With them
  the opening of the batch is, as it has to be of the same ones.
* One optimizer step has the figures that it has. Those of several are means, weighted as the loss weighs: by tokens, or
  by samples where the loss is a mean over samples. What compares the engine with the learner is that of the first
  step: later ones have moved away from the weights that the engine had.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from torch.profiler import record_function

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.batch.updates import divide_batch, whole_batch
from penstock.backends.learners.hooks.agreement import check_agreement
from penstock.backends.learners.hooks.batches import BatchHooks
from penstock.backends.learners.learning_rate import critic_learning_rate, policy_learning_rate
from penstock.backends.learners.objectives.mismatch import COMPARISON_SUMS
from penstock.backends.learners.objectives.objective import finished
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.objectives.validity import compares_rewards
from penstock.backends.learners.training.alarms import LOSS_SCALE, OVERFLOWS, Alarms
from penstock.backends.learners.training.metrics import as_metrics, batch_metrics
from penstock.backends.learners.training.mismatched import mismatched
from penstock.backends.learners.training.roles import OutOfMemoryElsewhereError, OutOfMemoryError
from penstock.backends.learners.training.token_records import TokenRecorder
from penstock.backends.profiling import ThreadProfiler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.learners.batch.packing import Division
    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.objective_names import Reduction
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.training.flops import Speed
    from penstock.backends.learners.training.micro_batch_size import MicroBatchSize
    from penstock.backends.learners.training.step import BatchTokens
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.base import Metric
    from penstock.messages.samples import Group

OF_FIRST_STEP: Final = (
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_kl",
    *COMPARISON_SUMS,
)
LOSSES: Final = ("train/loss", "train/pg_loss")
"""Means over samples under ``reduction: constant``, where the other figures are means over tokens."""
NORMS: Final = ("train/grad_norm", "train/critic-grad_norm", "train/mtp_grad_norm")


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
    """Version of the policy that the batch begins with."""
    is_only: bool
    """Whether the batch is one optimizer step."""
    trains_policy: bool


class Added(NamedTuple):
    """What came of the gradients of one optimizer step."""

    known: BatchTokens
    totals: dict[str, float]
    """Sums over its tokens, the same on every rank."""


class TrainedUpdate(NamedTuple):
    """One optimizer step that was made."""

    update: Update
    totals: Mapping[str, float]
    """Sums over its tokens, and the norms of its gradients."""


class BatchTrainer(ABC):
    """Owns models and optimizers, reads batches, divides them into updates, and collects the figures."""

    _size: MicroBatchSize
    """Of the micro-batches; found by the subclass."""

    def __init__(
        self,
        options: LearnerOptions,
        *,
        num_steps: int,
        seed: int,
        dtype: str,
        speed: Speed,
        workers: WorkerGroup,
        run_folder: Path | None = None,
        quantizes: bool = False,
    ) -> None:
        """
        Args:
            options: the ``learner:`` block.
            num_steps: of the whole run, for the schedule.
            seed: of the order in which a batch is gone through, where it is divided.
            dtype: that the model computes in.
            speed: of its steps.
            workers: all ranks; each has such a trainer, and they are called alike.
            run_folder: for dumps and profiles of steps; None: there are none.
            quantizes: engines get the weights in FP8.

        Raises:
            UserCodeError: a hook cannot be loaded.
        """
        self._options = options
        self._divides_by_sample = not compares_rewards(options.objective)
        self._num_steps = num_steps
        self._seed = seed
        self._speed = speed
        self._running: Sequence[Update] = ()
        """Whose micro-batches are run, or were run last."""
        self._alarms = Alarms(options, dtype, quantizes=quantizes)
        self._workers = workers
        self._hooks = BatchHooks(options, workers)
        dump, profile = options.dump, options.profile
        self._recorder = TokenRecorder(dump, workers, run_folder) if dump and run_folder else None
        self._profiler: ThreadProfiler | None = None
        if profile is not None and run_folder is not None:
            is_cuda = workers.device.type == "cuda"
            self._profiler = ThreadProfiler(run_folder, stacks=profile.stacks, memory=profile.memory, is_cuda=is_cuda)

    @abstractmethod
    def check_length(self, sequence: TrainSequence, what: str, /) -> None:
        """
        Raises:
            UserFault: the sequence is longer than the model's context.
        """

    @abstractmethod
    def _added(self, work: UpdateWork, pairs: Update | None, /) -> Added:
        """Open the batch, if that has not been done, and add the gradients of an update.

        Args:
            work: the update.
            pairs: what the reference point of KTO is found from; None where there is none.

        Raises:
            OutOfMemoryError: a micro-batch was too large; some gradients have been added.
        """

    @abstractmethod
    def _division(self, update: Update, /) -> Division:
        """Its micro-batches, at the size that they have now."""

    @abstractmethod
    def forget_gradients(self) -> None:
        """Those of policy and critic."""

    @abstractmethod
    def change(self, totals: Mapping[str, float], *, step: int, name: str) -> dict[str, float]:
        """Apply the gradients; the norms that they had.

        Args:
            totals: of the update, as ``add`` gave them.
            step: batches before this one.
            name: of the optimizer step, for messages.

        Raises:
            DivergedError: loss or gradient is not finite; that optimizer step has not changed the weights.
        """

    @property
    def max_tokens_per_micro_batch(self) -> int:
        """As it was found to fit."""
        return self._size.max_tokens

    def add(self, work: UpdateWork, /) -> Added:
        """Open the batch, if that has not been done, and add the gradients of an update.

        Raises:
            MemoryError: a micro-batch does not fit, and cannot be made smaller.
        """
        pairs = mismatched(work.update) if loss_of(self._options.objective).needs_reference_point else None
        self._running = [work.update, *(() if work.known else work.first_pass), *([] if pairs is None else [pairs])]
        is_retried = False
        while True:
            is_short = True
            try:
                added = self._added(work, pairs)
            except OutOfMemoryElsewhereError:
                is_short = False
            except OutOfMemoryError:
                pass
            else:
                if is_retried:
                    self._size.worked(step=work.version + 1)
                return added
            # Out of the handler, and with it of every frame and tensor that the error held.
            is_retried = True
            self.forget_gradients()
            if self._recorder is not None:
                self._recorder.forget()
            if is_short:
                self._size.halve(can_be_finer=self._can_be_finer)

    @property
    def _can_be_finer(self) -> bool:
        """Whether some micro-batch that is run has several sequences."""
        return not all(self._division(update).is_finest for update in self._running)

    def accumulate(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """Find the gradient of the whole batch, as one step, and leave the weights alone; the figures under ``train/``.

        Args:
            batch: with at least one trained token.
            version: of the policy as it is now.
        """
        update = whole_batch(batch)
        found = self.add(UpdateWork(batch, [update], update, None, version, is_only=True, trains_policy=True))
        return {**found.known.figures(), **finished(found.totals)}

    def train(
        self, groups: Sequence[Group], *, version: int, min_token_version: int, mask_old_tokens: bool = False
    ) -> StepResult:
        """Train one batch, which makes ``version`` (the first batch makes 1).

        Raises:
            UserFault: a sample has a reward that is not finite, or is longer than the model's context.
            UserCodeError: a function of the user's failed, or returned what cannot be used.
            DivergedError: see :meth:`change`.
            MemoryError: a micro-batch does not fit, and cannot be made smaller.
        """
        with ExitStack() as stack:
            if self._profiler is not None and (profile := self._options.profile) is not None and profile.takes(version):
                stack.enter_context(self._profiler.around(f"learner-step-{version:07d}-rank-{self._workers.rank}"))
            started_s = time.perf_counter()
            batch = read_groups(groups, min_token_version=min_token_version, mask_old_tokens=mask_old_tokens)
            batch = self._hooks.prepared(batch, version=version - 1)
            for sequence in batch.sequences:
                self.check_length(sequence, "a sample")
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
        """Pass after pass the updates of the batch, an optimizer step each; figures under ``train/``."""
        options, objective = self._options, self._options.objective
        by_sample = self._divides_by_sample
        draws = [random.Random(f"updates {self._seed} {step} {index}") for index in range(options.num_passes)]
        passes = [divide_batch(batch, options.num_updates, by_sample=by_sample, draw=draw) for draw in draws]
        updates = [update for part in passes for update in part]
        trains_policy = step >= objective.critic_only_steps
        known: BatchTokens | None = None
        trained: list[TrainedUpdate] = []
        if self._recorder is not None:
            self._recorder.begin(step + 1)
        for number, update in enumerate(updates, start=1):
            is_only = len(updates) == 1
            with record_function("gradients"):
                found = self.add(UpdateWork(batch, passes[0], update, known, step, is_only, trains_policy))
            if self._recorder is not None and number == len(
                passes[0]
            ):  # before the change, so that what is not finite can be looked at
                self._recorder.write(batch, step + 1)
            if known is None and found.known.user_values is not None:
                check_agreement(
                    self._workers, found.known.user_values, "learner.objective: what its functions returned"
                )
            known = found.known
            name = f"step {step + 1}" if is_only else f"step {step + 1}, update {number} of {len(updates)}"
            with record_function("optimizer step"):
                norms = self.change(found.totals, step=step, name=name)
            trained.append(TrainedUpdate(update, found.totals | norms))
        # Figures are means over tokens where the user weighs, as they are where the loss is a sum over a constant.
        has_function = objective.reduction_function is not None
        figures = {} if known is None else known.figures()
        figures |= joined_figures(trained, "constant" if has_function else objective.reduction)
        if trains_policy:
            figures["train/lr-pg_0"] = policy_learning_rate(step, options, num_steps=self._num_steps)
        if objective.critic != "none":
            figures["train/critic-lr-pg_0"] = critic_learning_rate(step, options, num_steps=self._num_steps)
        return figures


def joined_figures(trained: Sequence[TrainedUpdate], reduction: Reduction) -> dict[str, float]:
    """The figures of a batch from those of its optimizer steps, by metric name.

    Args:
        trained: the steps in their order, at least one.
        reduction: of the loss.
    """
    first = trained[0].totals
    names = {name: None for each in trained for name in each.totals}
    figures = finished(first if len(trained) == 1 else {name: _joined(name, trained, reduction) for name in names})
    if len(trained) > 1:
        for name in NORMS:
            if norms := [each.totals[name] for each in trained if name in each.totals]:
                figures[f"{name}_max"] = max(norms)
        if "train/ppo_kl" in first:
            figures["train/first_ppo_kl"] = first["train/ppo_kl"]
    return {**figures, "train/num_updates": float(len(trained))}


def _joined(name: str, trained: Sequence[TrainedUpdate], reduction: Reduction) -> float:
    """One figure of several steps."""
    if name in OF_FIRST_STEP:
        return trained[0].totals.get(name, 0.0)
    steps = [each for each in trained if name in each.totals]
    if name == LOSS_SCALE:
        return steps[-1].totals[name]
    if name == OVERFLOWS or name.startswith("sums/"):
        return sum(each.totals[name] for each in steps)
    if name in NORMS:
        weights = [1] * len(steps)
    elif reduction == "sequence_mean" or (reduction == "constant" and name in LOSSES):
        weights = [each.update.num_samples for each in steps]
    else:
        weights = [each.update.num_tokens for each in steps]
    return sum(w * each.totals[name] for w, each in zip(weights, steps, strict=True)) / sum(weights)
