"""A learner that trains with megatron-core, as one rank of a worker group.

Invariants:

* See :mod:`penstock.backends.learners.training.command_worker`. A model that is divided is run, gathered and saved
  by all of its ranks.
* A rank that holds the critic alone (:mod:`.roles`) trains and saves it, takes part in writing the rest, and publishes
  nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.checkpoints.channel import CheckpointChannel
from penstock.backends.learners.checkpoints.record import LearnerFacts
from penstock.backends.learners.megatron.checkpoint.checkpoint import POLICY, MegatronCheckpoints
from penstock.backends.learners.megatron.critic import CRITIC, OwnCritic, SharedCritic
from penstock.backends.learners.megatron.opened import LearnerOpener, OpenedLearner
from penstock.backends.learners.megatron.optimizer.offload import SleepingMemory
from penstock.backends.learners.megatron.reference import copy_weights
from penstock.backends.learners.megatron.roles import roles_of
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.training.canary import canary_under
from penstock.backends.learners.training.command_worker import CommandWorker, Published

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.worker import WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.commands import PublishWeights
    from penstock.messages.local import CheckpointWritten

_log: Final = logging.getLogger(__name__)


class MegatronWorker(CommandWorker[OpenedLearner]):
    """One rank of the learner; see :class:`.LearnerWorker`."""

    def __init__(
        self, plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost, exporter: WeightExporter | None
    ) -> None:
        super().__init__(plan, workers, host, exporter)
        channel = CheckpointChannel(workers)  # of all ranks, while torch knows them as such
        self._roles = roles_of(workers, plan.options)
        self._opener = LearnerOpener(plan, self._roles, exporter, check_stop=host.check_stop, report=self._report)
        self._checkpoints = MegatronCheckpoints(
            self._folder,
            epoch=plan.epoch,
            model_folder=Path(plan.model_folder),
            workers=workers,
            options=plan.options,
            done=host.emit,
            fail=host.fail,
            roles=self._roles,
            channel=channel,
        )

    def settle(self) -> None:
        self._checkpoints.wait()

    @property
    def _saved(self) -> CheckpointWritten:
        return self._checkpoints.saved

    def _delete_checkpoints(self, below_version: int) -> None:
        self._checkpoints.delete_below(below_version)

    def _begin(self) -> OpenedLearner:
        return self._opener.begin()

    def _resume(self, folder: Path, version: int) -> OpenedLearner:
        stored = self._checkpoints.open(folder, version=version, dtype=self._plan.dtype)
        return self._opener.resume(stored)

    def _refresh_reference(self, opened: OpenedLearner) -> bool:
        policy = opened.policy
        if policy is not None and policy.reference is not None:
            policy.trainable.gather_weights()
            copy_weights(policy.trainable.model, policy.reference)
        return self._has_reference

    def _published(self, opened: OpenedLearner, command: PublishWeights) -> Published:
        policy = opened.policy
        if policy is None:
            return Published(None, {})
        return policy.publisher.publish(
            version=command.version,
            publish=command.publish,
            canary=lambda: canary_under(policy.canary_model, opened.canary),
        )

    def _begin_save(self, opened: OpenedLearner) -> None:
        facts = LearnerFacts(
            version=opened.version,
            dtype=self._plan.dtype,
            trained_tokens=opened.trained_tokens,
            canary=opened.canary,
            reference_version=opened.reference_version,
        )
        policy, critic = opened.policy, opened.critic
        self._checkpoints.begin_save(
            self._trainables(opened),
            facts,
            reference=None if policy is None else policy.reference,
            tensors=opened.trainer.scale.state() | (critic.state() if isinstance(critic, SharedCritic) else {}),
            asleep=opened.sleeping,
        )

    def _fall_asleep(self, opened: OpenedLearner) -> None:
        reference = None if opened.policy is None else opened.policy.reference
        trained = list(self._trainables(opened).values())
        frozen_models = [] if reference is None else [reference]
        opened.sleeping = SleepingMemory(trained, frozen_models, device=self._workers.device)
        _log.info("asleep: %d bytes are given up", opened.sleeping.size_bytes)

    @property
    def _has_reference(self) -> bool:
        """Whether the learner has one, on this rank or on others."""
        return needs_reference(self._plan.options.objective)

    @staticmethod
    def _trainables(opened: OpenedLearner) -> dict[str, TrainableModel]:
        """The models that this rank trains, by their names in checkpoints."""
        found = {} if opened.policy is None else {POLICY: opened.policy.trainable}
        return found | ({CRITIC: opened.critic.trainable} if isinstance(opened.critic, OwnCritic) else {})

    def _wake_up(self, opened: OpenedLearner) -> None:
        if opened.sleeping is not None:
            opened.sleeping.restore()
            opened.sleeping = None
