"""Makes what a learner of megatron-core consists of, from a model or from a checkpoint.

Invariants:

* Everything here is a collective: each rank makes its share, in the same order as the others.
* A rank that holds the critic alone (:mod:`.roles`) begins with the policy's weights as they are before the first
  batch, which it finds by itself and does not keep.
* An optimizer is made after its model has its weights, which it copies; what is published and saved is read from the
  model that the optimizer has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.learners.batch.sequences import demonstration_sequences
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.canary import SharedCanary
from penstock.backends.learners.megatron.checkpoint.checkpoint import read_weights
from penstock.backends.learners.megatron.critic import OwnCritic, copy_trunk, critic_model, open_critic
from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.layout.source_ranks import SourceRanks
from penstock.backends.learners.megatron.model.build import build_model, let_go, open_groups
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
from penstock.backends.learners.megatron.reference import copy_weights, frozen
from penstock.backends.learners.megatron.schedule.micro_batches import check_length
from penstock.backends.learners.megatron.trainer import MegatronTrainer
from penstock.backends.learners.megatron.warm_start import warm_start
from penstock.backends.learners.megatron.weights.load import freeze
from penstock.backends.learners.megatron.weights.publishing import WeightPublisher
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.training.canary import choose_canary
from penstock.backends.learners.training.command_worker import Opened
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.learners.megatron.checkpoint.checkpoint import StoredCheckpoint
    from penstock.backends.learners.megatron.critic import MegatronCritic
    from penstock.backends.learners.megatron.layout.model_config import Precision
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.offload import SleepingMemory
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.training.roles import Roles
    from penstock.backends.weights.protocol import WeightExporter


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPolicy:
    """What there is of the policy, on ranks that hold it."""

    trainable: TrainableModel
    reference: ParallelModel | None
    publisher: WeightPublisher
    canary_model: SharedCanary


@dataclass(slots=True, kw_only=True)
class OpenedLearner(Opened[MegatronTrainer]):
    """What exists from ``OpenLearner`` on."""

    policy: OpenedPolicy | None
    """None where other ranks hold it."""
    critic: MegatronCritic | None
    sleeping: SleepingMemory | None = None
    """While it sleeps, on a device of its own memory."""


class LearnerOpener:
    """Opens one learner."""

    def __init__(
        self,
        plan: LearnerPlan,
        roles: Roles,
        exporter: WeightExporter | None,
        *,
        check_stop: Callable[[], None],
        report: Callable[[dict[str, float]], None],
    ) -> None:
        """
        Args:
            plan: of the learner.
            roles: what this rank holds.
            exporter: None on every rank but the first.
            check_stop: called before each micro-batch; raises to end the learner.
            report: called with figures that people may look at while the learner opens.
        """
        self._plan = plan
        self._options = plan.options
        self._roles, self._workers = roles, roles.own
        self._exporter = exporter
        self._check_stop = check_stop
        self._report = report
        self._layout = layout_of(plan.options.megatron, roles.own.num_ranks)
        self._sources = SourceRanks(roles.own, self._layout)

    def begin(self) -> OpenedLearner:
        """From the model of the scenario, after a warm start if there is to be one."""
        self._open_groups()
        if not self._roles.has_policy:
            return self._opened_with(None, self._critic_alone(self._like_the_policy()), ())
        model = self._read()
        trainable = self._trainable(model)
        self._warm_start(trainable)
        reference = None
        if needs_reference(self._options.objective):
            reference = frozen(self._built(is_trained=False))
            trainable.gather_weights()
            copy_weights(model, reference)
        critic = self._critic_beside(trainable)
        return self._opened_with(self._policy(trainable, reference), critic, self._canary(trainable))

    def resume(self, stored: StoredCheckpoint) -> OpenedLearner:
        """From a checkpoint."""
        self._open_groups()
        record = stored.record
        opened = self._resumed(stored)
        stored.restore_random_state()
        if not stored.is_fresh:
            opened.trainer.scale.restore(stored.tensors())
        opened.version, opened.trained_tokens = record.version, record.trained_tokens
        opened.reference_version = 0 if record.reference is None else record.reference.version
        return opened

    def _resumed(self, stored: StoredCheckpoint) -> OpenedLearner:
        if not self._roles.has_policy:
            return self._opened_with(None, self._critic_alone(self._bare_critic(), stored), stored.record.canary)
        model = self._built()
        stored.load_weights(model)
        trainable = self._trainable(model)
        stored.load_optimizer(trainable)
        reference = None
        if needs_reference(self._options.objective):
            reference = frozen(self._built(is_trained=False))
            stored.load_reference(reference)
        # One that was made from a model has none yet.
        canary = stored.record.canary or self._canary(trainable)
        critic = self._critic_beside(trainable, stored)
        return self._opened_with(self._policy(trainable, reference), critic, canary)

    def _read(self) -> ParallelModel:
        """The model of the scenario."""
        model = self._built()
        read_weights(model, Path(self._plan.model_folder), rank=self._workers.rank)
        return model

    def _like_the_policy(self) -> ParallelModel:
        """A critic whose layers are what the policy's are before the first batch; of that nothing is kept."""
        policy = self._read()
        if self._options.warm_start is not None:
            trainable = self._trainable(policy)
            self._warm_start(trainable)
            trainable.gather_weights()
            let_go(trainable.chunks)
        model = self._bare_critic()
        copy_trunk(policy, model)
        return model

    def _bare_critic(self) -> ParallelModel:
        """With weights that mean nothing yet."""
        return critic_model(
            read_architecture(Path(self._plan.model_folder)),
            self._layout,
            self._options,
            precision=self._precision,
            device=self._workers.device,
        )

    def _open_groups(self) -> None:
        open_groups(self._layout, seed=self._plan.seed, timeout_s=self._workers.timeout_s)

    def _built(self, *, is_trained: bool = True) -> ParallelModel:
        """A model of the scenario's architecture whose weights mean nothing yet."""
        options = self._options.megatron
        return build_model(
            read_architecture(Path(self._plan.model_folder)),
            self._layout,
            options if is_trained else msgspec.structs.replace(options, mtp=None),
            precision=self._precision,
            device=self._workers.device,
        )

    @property
    def _precision(self) -> Precision:
        asked = self._options.megatron.precision or self._plan.dtype
        match asked:
            case "float32" | "bfloat16" | "float16":
                return asked
            case _:
                raise UserFault(f"model.dtype: expected float32, bfloat16 or float16, got {asked!r}")

    def _trainable(self, model: ParallelModel) -> TrainableModel:
        options, objective = self._options, self._options.objective
        freeze(model, options, rank=self._workers.rank)
        return TrainableModel(
            model,
            options.megatron,
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            device=self._workers.device,
            temperature=self._plan.temperature,
            entropy_gradient=objective.entropy_coef != 0.0 or loss_of(objective).is_function,
            check_stop=self._check_stop,
        )

    def _critic_beside(self, policy: TrainableModel, stored: StoredCheckpoint | None = None) -> MegatronCritic | None:
        if not self._roles.has_critic:
            return None
        return open_critic(
            policy,
            self._options,
            num_steps=self._plan.num_steps,
            workers=self._workers,
            check_stop=self._check_stop,
            stored=stored,
        )

    def _critic_alone(self, model: ParallelModel, stored: StoredCheckpoint | None = None) -> OwnCritic:
        return OwnCritic(
            model,
            self._options,
            num_steps=self._plan.num_steps,
            device=self._workers.device,
            check_stop=self._check_stop,
            stored=stored,
        )

    def _canary(self, policy: TrainableModel) -> tuple[int, ...]:
        return choose_canary(SharedCanary(policy, self._sources))

    def _policy(self, trainable: TrainableModel, reference: ParallelModel | None) -> OpenedPolicy:
        rank, device = self._workers.rank, self._workers.device
        return OpenedPolicy(
            trainable=trainable,
            reference=reference,
            publisher=WeightPublisher(trainable, self._exporter, rank=rank, device=device),
            canary_model=SharedCanary(trainable, self._sources),
        )

    def _opened_with(
        self, policy: OpenedPolicy | None, critic: MegatronCritic | None, canary: tuple[int, ...]
    ) -> OpenedLearner:
        trainer = MegatronTrainer(
            None if policy is None else policy.trainable,
            None if policy is None else policy.reference,
            self._options,
            temperature=self._plan.temperature,
            num_steps=self._plan.num_steps,
            check_stop=self._check_stop,
            seed=self._plan.seed,
            workers=self._roles.everyone,
            roles=self._roles,
            critic=critic,
            folder=Path(self._plan.checkpoints_folder),
            run_folder=self._plan.run_folder,
            quantizes=self._plan.export.quantizes,
        )
        return OpenedLearner(trainer=trainer, policy=policy, critic=critic, canary=canary)

    def _warm_start(self, trainable: TrainableModel) -> None:
        block = self._options.warm_start
        if block is None:
            return
        check = partial(check_length, architecture=trainable.model.architecture)
        sequences = demonstration_sequences(self._plan.demonstration_ids(), check)
        self._report({"learner/warm_start_fraction": 0.0})
        warm_start(
            trainable,
            sequences,
            self._options,
            block,
            seed=self._plan.seed,
            report=lambda fraction, loss: self._report(
                {"learner/warm_start_fraction": fraction, "learner/warm_start_loss": loss}
            ),
            workers=self._workers,
        )
