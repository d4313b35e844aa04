"""Carries out the learner's commands with megatron-core, as one rank of a gang.

Invariants:

* Every rank carries out the same commands in the same order, and takes part in all that any of them needs: a model that
  is divided is run, gathered and saved by all of its ranks. The first rank alone exports weights, and its answers are
  the learner's; what the others return is not looked at.
* ``SaveCheckpoint`` copies the state between two steps; what follows does not wait for the disk. It is answered when
  the checkpoint is durable.
* Each other command is answered by exactly one event; ``ReleaseWeights`` and ``DeleteCheckpoints`` by none.
* Asleep it has nothing on its device. Where the learner is on a CPU its memory is that of the engines anyway, and
  nothing is moved.
* ``Train`` makes exactly the next version. What is published or saved is the current one.

| wait | who ends it |
|---|---|
| at a second checkpoint and at the end, for the one that is being written | its writer, which the process outlives |
| in a command, for the other ranks | they do; at the latest the timeout of the :class:`.Gang` |
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

from penstock.backends.learners.gang.planned import exporter_of
from penstock.backends.learners.megatron.checkpoint import POLICY, LearnerFacts, MegatronCheckpoints
from penstock.backends.learners.megatron.critic import CRITIC, OwnCritic, SharedCritic
from penstock.backends.learners.megatron.offload import SleepingMemory
from penstock.backends.learners.megatron.opened import LearnerOpener
from penstock.backends.learners.megatron.reference import copy_weights
from penstock.backends.learners.metrics import as_metrics
from penstock.backends.learners.schedule import is_reference_due
from penstock.messages.commands import (
    DeleteCheckpoints,
    LearnerCommand,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    SleepLearner,
    Train,
    WakeLearner,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    WeightsPublished,
)

if TYPE_CHECKING:
    from penstock.backends.learners.gang.gang import Gang
    from penstock.backends.learners.gang.plan import GangPlan
    from penstock.backends.learners.gang.words import LearnerAnswer
    from penstock.backends.learners.gang.worker import WorkerHost
    from penstock.backends.learners.megatron.opened import OpenedLearner
    from penstock.backends.weights.protocol import WeightExporter

SEPARATE_MEMORY: Final = ("cuda",)
"""Devices whose memory is not the host's: only there anything is moved when the learner sleeps."""

_log: Final = logging.getLogger(__name__)


def open_megatron_worker(plan: GangPlan, gang: Gang, host: WorkerHost) -> MegatronWorker:
    """What works in a rank of this learner; the first rank publishes the weights.

    Raises:
        WeightExportError: they cannot be published there.
    """
    return MegatronWorker(plan, gang, host, exporter_of(plan, gang))


class MegatronWorker:
    """One rank of the learner; see :class:`.LearnerWorker`."""

    def __init__(self, plan: GangPlan, gang: Gang, host: WorkerHost, exporter: WeightExporter | None) -> None:
        """
        Args:
            plan: of the learner.
            gang: all ranks.
            host: the process.
            exporter: None on every rank but the first.
        """
        self._plan = plan
        self._options = plan.options
        self._gang = gang
        self._host = host
        self._exporter = exporter
        self._opener = LearnerOpener(plan, gang, exporter, check_stop=host.check_stop, report=self._report)
        self._checkpoints = MegatronCheckpoints(
            Path(plan.checkpoints_folder),
            epoch=plan.epoch,
            model_folder=Path(plan.model_folder),
            gang=gang,
            options=plan.options,
            done=host.emit,
            fail=host.fail,
        )
        self._opened: OpenedLearner | None = None
        self._figures: dict[str, float] = {}

    def carry_out(self, command: LearnerCommand, /) -> LearnerAnswer | None:
        """See :class:`.LearnerWorker`."""
        match command:
            case OpenLearner():
                return self._open(command)
            case Train():
                return self._train(command)
            case PublishWeights():
                return self._publish(command)
            case ReleaseWeights():
                if self._exporter is not None:
                    self._exporter.release(command.below_version)
                return None
            case SaveCheckpoint():
                return self._save(command)
            case DeleteCheckpoints():
                if self._gang.is_first:
                    self._checkpoints.delete_below(command.below_version)
                return None
            case SleepLearner():
                return self._sleep()
            case WakeLearner():
                return self._wake()
            case _:
                assert_never(command)

    def finish(self) -> None:
        """See :class:`.LearnerWorker`."""
        if self._exporter is not None:
            self._exporter.close()
        self._checkpoints.wait()

    def _open(self, command: OpenLearner) -> LearnerOpened:
        if self._opened is not None:
            raise ValueError("OpenLearner came twice; a learner is opened once")
        if not command.path and command.version:
            raise ValueError(f"OpenLearner names version {command.version} and no checkpoint of it")
        self._opened = self._resume(command) if command.path else self._opener.begin()
        return LearnerOpened(version=self._opened.version)

    def _resume(self, command: OpenLearner) -> OpenedLearner:
        stored = self._checkpoints.open(Path(command.path), version=command.version, dtype=self._plan.dtype)
        opened = self._opener.resume(stored)
        self._report({"learner/trained_tokens": opened.trained_tokens})
        return opened

    def _train(self, command: Train) -> BatchTrained:
        opened = self._ready(command.version - 1, "Train", awake=True)
        result = opened.trainer.train(
            command.groups, version=command.version, min_token_version=command.min_token_version
        )
        opened.version = command.version
        if opened.reference is not None and is_reference_due(command.version, self._options):
            opened.trainable.gather_weights()
            copy_weights(opened.trainable.model, opened.reference)
            opened.reference_version = command.version
        opened.trained_tokens += result.num_trained_tokens
        self._report({"learner/trained_tokens": opened.trained_tokens, "learner/step_time_s": result.step_time_s})
        return BatchTrained(
            version=command.version,
            num_trained_tokens=result.num_trained_tokens,
            num_masked_tokens=result.num_masked_tokens,
            metrics=result.metrics,
            notices=result.notices,
        )

    def _publish(self, command: PublishWeights) -> WeightsPublished | None:
        opened = self._ready(command.version, "PublishWeights", awake=True)
        published = opened.publisher.publish(
            version=command.version,
            publish=command.publish,
            canary=lambda: opened.canary_model.under(opened.canary),
        )
        self._report(published.figures)
        return None if published.manifest is None else WeightsPublished(manifest=published.manifest)

    def _save(self, command: SaveCheckpoint) -> CheckpointWritten | None:
        opened = self._ready(command.version, "SaveCheckpoint")
        self._checkpoints.wait()
        self._host.check_stop()
        if self._checkpoints.saved.version == command.version:
            return self._checkpoints.saved
        began_s = time.perf_counter()
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
        self._report({"learner/snapshot_time_s": time.perf_counter() - began_s})
        return None

    def _sleep(self) -> LearnerSlept:
        opened = self._checked("SleepLearner", is_asleep=False)
        began_s = time.perf_counter()
        if self._gang.device.type in SEPARATE_MEMORY:
            frozen_models = [] if opened.reference is None else [opened.reference]
            trained = [opened.trainable, *([opened.critic.trainable] if isinstance(opened.critic, OwnCritic) else [])]
            opened.sleeping = SleepingMemory(trained, frozen_models, device=self._gang.device)
            _log.info("asleep: %d bytes are given up", opened.sleeping.size_bytes)
        opened.is_asleep = True
        self._report({"learner/sleep_time_s": time.perf_counter() - began_s})
        return LearnerSlept()

    def _wake(self) -> LearnerWoken:
        opened = self._checked("WakeLearner", is_asleep=True)
        began_s = time.perf_counter()
        if opened.sleeping is not None:
            opened.sleeping.restore()
            opened.sleeping = None
        opened.is_asleep = False
        self._report({"learner/wake_time_s": time.perf_counter() - began_s})
        return LearnerWoken()

    def _checked(self, command: str, *, is_asleep: bool) -> OpenedLearner:
        if self._opened is None or self._opened.is_asleep != is_asleep:
            found = "has not opened yet" if self._opened is None else "sleeps" if self._opened.is_asleep else "is awake"
            raise ValueError(f"{command} came to a learner that {found}")
        return self._opened

    def _ready(self, version: int, command: str, *, awake: bool = False) -> OpenedLearner:
        if self._opened is None:
            raise ValueError(f"{command} came before OpenLearner")
        if awake:
            self._checked(command, is_asleep=False)
        if self._opened.version != version:
            raise ValueError(f"{command} needs the learner at version {version}, and it is at {self._opened.version}")
        return self._opened

    def _report(self, figures: dict[str, float]) -> None:
        self._figures |= figures
        self._host.show(as_metrics(self._figures))
