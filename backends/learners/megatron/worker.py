"""A learner that trains with megatron-core, as one rank of a worker group.

Invariants:

* See :mod:`penstock.backends.learners.training.command_worker`. A model that is divided is run, gathered and saved
  by all of its ranks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.megatron.checkpoint.checkpoint import POLICY, LearnerFacts, MegatronCheckpoints
from penstock.backends.learners.megatron.critic import CRITIC, OwnCritic, SharedCritic
from penstock.backends.learners.megatron.opened import LearnerOpener, OpenedLearner
from penstock.backends.learners.megatron.optimizer.offload import SleepingMemory
from penstock.backends.learners.megatron.reference import copy_weights
from penstock.backends.learners.training.canary import canary_under
from penstock.backends.learners.training.command_worker import CommandWorker
from penstock.backends.learners.worker_group.planned import exporter_of

if TYPE_CHECKING:
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.training.command_worker import Published
    from penstock.backends.learners.worker_group.worker import WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.commands import OpenLearner, PublishWeights
    from penstock.messages.local import CheckpointWritten

_log: Final = logging.getLogger(__name__)


def open_megatron_worker(plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost) -> MegatronWorker:
    """What works in a rank of this learner; the first rank publishes the weights.

    Raises:
        WeightExportError: they cannot be published there.
    """
    return MegatronWorker(plan, workers, host, exporter_of(plan, workers))


class MegatronWorker(CommandWorker[OpenedLearner]):
    """One rank of the learner; see :class:`.LearnerWorker`."""

    def __init__(
        self, plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost, exporter: WeightExporter | None
    ) -> None:
        """
        Args:
            plan: of the learner.
            worker group: all ranks.
            host: the process.
            exporter: None on every rank but the first.
        """
        super().__init__(plan.options, workers, host, exporter)
        self._plan = plan
        self._opener = LearnerOpener(plan, workers, exporter, check_stop=host.check_stop, report=self._report)
        self._checkpoints = MegatronCheckpoints(
            Path(plan.checkpoints_folder),
            epoch=plan.epoch,
            model_folder=Path(plan.model_folder),
            workers=workers,
            options=plan.options,
            done=host.emit,
            fail=host.fail,
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

    def _resume(self, command: OpenLearner) -> OpenedLearner:
        stored = self._checkpoints.open(Path(command.path), version=command.version, dtype=self._plan.dtype)
        return self._opener.resume(stored)

    def _refresh_reference(self, opened: OpenedLearner) -> bool:
        if opened.reference is None:
            return False
        opened.trainable.gather_weights()
        copy_weights(opened.trainable.model, opened.reference)
        return True

    def _published(self, opened: OpenedLearner, command: PublishWeights) -> Published:
        return opened.publisher.publish(
            version=command.version,
            publish=command.publish,
            canary=lambda: canary_under(opened.canary_model, opened.canary),
        )

    def _begin_save(self, opened: OpenedLearner) -> None:
        facts = LearnerFacts(
            version=opened.version,
            dtype=self._plan.dtype,
            trained_tokens=opened.trained_tokens,
            canary=opened.canary,
            reference_version=opened.reference_version,
        )
        critic = opened.critic
        trainables = {POLICY: opened.trainable}
        if isinstance(critic, OwnCritic):
            trainables[CRITIC] = critic.trainable
        self._checkpoints.begin_save(
            trainables,
            facts,
            reference=opened.reference,
            tensors=critic.state() if isinstance(critic, SharedCritic) else None,
            asleep=opened.sleeping,
        )

    def _fall_asleep(self, opened: OpenedLearner) -> None:
        frozen_models = [] if opened.reference is None else [opened.reference]
        trained = [opened.trainable, *([opened.critic.trainable] if isinstance(opened.critic, OwnCritic) else [])]
        opened.sleeping = SleepingMemory(trained, frozen_models, device=self._workers.device)
        _log.info("asleep: %d bytes are given up", opened.sleeping.size_bytes)

    def _wake_up(self, opened: OpenedLearner) -> None:
        if opened.sleeping is not None:
            opened.sleeping.restore()
            opened.sleeping = None
