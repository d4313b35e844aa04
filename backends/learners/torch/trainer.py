"""The optimizer steps of a batch by torch, on one rank or several; see :mod:`.batch_trainer`.

Invariants:

* Loss, gradient and figures are those of the whole batch, whatever its micro-batches and the ranks are
  (:mod:`.accumulation`).
* Every rank runs its own micro-batches.
* Policy and critic lie on every rank, or on different ones (:mod:`.roles`); either way the figures are on all of them.
* What overflows float16 is not applied, counted, and halves the loss scale
  (:mod:`~penstock.backends.learners.training.loss_scale`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.learning_rate import policy_learning_rate
from penstock.backends.learners.torch.accumulation import Accumulation
from penstock.backends.learners.torch.critic import Critic
from penstock.backends.learners.torch.model import ADAPTER_PREFIX, CheckpointError
from penstock.backends.learners.torch.optimizer import MasterAdamW
from penstock.backends.learners.torch.parallel import copies_group, hollow, tensor_group
from penstock.backends.learners.torch.roles import roles_of
from penstock.backends.learners.torch.sight import FirstLook
from penstock.backends.learners.torch.speed import DTYPE_NAMES, speed_of
from penstock.backends.learners.training.batch_trainer import BatchTrainer
from penstock.backends.learners.training.loss_scale import LossScale
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.batch.packing import Division
    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.training.batch_trainer import Added, UpdateWork
    from penstock.backends.learners.training.roles import Roles
    from penstock.backends.learners.worker_group.workers import WorkerGroup


class PolicyTrainer(BatchTrainer):
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
        workers: WorkerGroup = SOLO,
        roles: Roles | None = None,
        run_folder: Path | None = None,
        quantizes: bool = False,
    ) -> None:
        """
        Args:
            model: what is trained, already divided over the ranks that hold what this one holds, as the reference is
                (:func:`.parallelize`). Where that is the critic alone it is what that begins with, and is not kept.
            options: the ``learner:`` block.
            temperature: of the sampling, so that log-probs are of the distribution that was sampled from.
            num_steps, seed, workers, run_folder, quantizes: as for :class:`.BatchTrainer`.
            reference: the policy that the KL term pulls to; None where ``kl_coef`` is 0.
            check_stop: called before each micro-batch; raises to end the step.
            roles: which of the ranks hold what; None: as the options say.

        Raises:
            CheckpointError: the model cannot have such a critic.
            UserFault, UserCodeError: the objective makes no sense, or its function cannot be loaded.
        """
        super().__init__(
            options,
            num_steps=num_steps,
            seed=seed,
            dtype=DTYPE_NAMES.get(model.dtype, str(model.dtype)),
            speed=speed_of(model, options, num_ranks=workers.num_ranks),
            workers=workers,
            run_folder=run_folder,
            quantizes=quantizes,
        )
        roles = self.roles = roles or roles_of(workers, options)
        scale = self._scale = LossScale(model.dtype)
        self._critic = _critic_of(model, options, num_steps, scale, roles)
        self._optimizer = _optimizer_of(model, options, scale, roles.own) if roles.has_policy else None
        self.model = model = model if roles.has_policy else hollow(model)
        """The policy; of one that is not held here only what it is like."""
        self._look = None if model.eyes is None else FirstLook(model, temperature)
        self._optimizers = [one for one in (self._optimizer, self._critic) if one is not None]
        self._accumulation = Accumulation(
            model, reference, self._critic, options, temperature=temperature, check_stop=check_stop, scale=scale,
            roles=roles, recorder=self._recorder,
        )  # fmt: skip
        self._size = self._accumulation.size

    def check_length(self, sequence: TrainSequence, what: str, /) -> None:
        """See :class:`.BatchTrainer`."""
        self.model.check_length(sequence, what)

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on beside the model and the version; see :meth:`.MasterAdamW.state`,
        :meth:`.Critic.state`, :meth:`.LossScale.state` and :meth:`.Adapters.state`."""
        adapters = self.model.adapters
        found = {} if adapters is None else adapters.state()
        for optimizer in self._optimizers:
            found |= optimizer.state()
        return found | self._scale.state()

    def layouts(self) -> dict[str, Tensor]:
        """Where and how what ``state`` has is divided over ranks; see :meth:`.MasterAdamW.layouts`."""
        return {name: tensor for optimizer in self._optimizers for name, tensor in optimizer.layouts().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; see :meth:`.MasterAdamW.restore` and :meth:`.Critic.restore`."""
        if self.model.adapters is not None:
            self.model.adapters.restore(tensors)
        elif any(name.startswith(ADAPTER_PREFIX) for name in tensors):
            raise CheckpointError(
                "the checkpoint was written with learner.lora, and its optimizer knows adapters only; resume with it, "
                "or start a new run from the checkpoint's model, which has them added in (model.path)"
            )
        for optimizer in self._optimizers:
            optimizer.restore(tensors)
        self._scale.restore(tensors)

    def accumulate(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """See :class:`.BatchTrainer`; on every rank the gradients are those of all ranks."""
        figures = super().accumulate(batch, version=version)
        for optimizer in self._optimizers:
            optimizer.sum_gradients()
        return figures

    def trained_weights(self) -> list[Tensor]:
        """Of the policy, as the optimizer changes them, with their gradients."""
        return [] if self._optimizer is None else self._optimizer.weights()

    def forget_gradients(self) -> None:
        """See :class:`.BatchTrainer`."""
        for optimizer in self._optimizers:
            optimizer.forget_gradients()

    def _added(self, work: UpdateWork, pairs: Update | None, /) -> Added:
        """See :class:`.BatchTrainer`."""
        if self._look is not None and work.known is None:
            self._look.at(work.batch, version=work.version)
        return self._accumulation.add(work, pairs)

    def _division(self, update: Update, /) -> Division:
        return self._accumulation.division(update)

    def change(self, totals: Mapping[str, float], *, step: int, name: str) -> dict[str, float]:
        """See :class:`.BatchTrainer`."""
        norms: dict[str, float] = {}
        if self._critic is not None:
            norms["train/critic-grad_norm"] = self._critic.step(step, loss=totals["train/value_loss"], name=name)
        if self._optimizer is not None and "train/loss" in totals:
            rate = policy_learning_rate(step, self._options, num_steps=self._num_steps)
            norms["train/grad_norm"] = self._optimizer.step(rate, loss=totals["train/loss"], name=name)
        if self.roles.are_apart:
            norms = self.roles.all_figures(norms)
        return self._scale.followed(norms, name=name) if self._scale.is_dynamic else norms


def _critic_of(
    model: PackedModel, options: LearnerOptions, num_steps: int, scale: LossScale, roles: Roles
) -> Critic | None:
    if not roles.has_critic:
        return None
    return Critic(model, options, num_steps=num_steps, scale=scale, workers=roles.own)


def _optimizer_of(model: PackedModel, options: LearnerOptions, scale: LossScale, workers: WorkerGroup) -> MasterAdamW:
    return MasterAdamW(
        model.model,
        options,
        compute_dtype=model.dtype,
        scale=scale,
        workers=workers,
        copies=copies_group(workers, options),
        tensor_ranks=tensor_group(workers, options),
    )
