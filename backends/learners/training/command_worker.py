"""Carries out the learner's commands as one rank of it, whatever trains: what torch and megatron-core have in common.

Invariants:

* Every rank carries out the same commands in the same order, and takes part in all that any of them needs. The first
  rank alone exports weights, and its answers are the learner's; what the others return is not looked at.
* ``SaveCheckpoint`` copies the state between two steps; what follows does not wait for the disk. It is answered when
  the checkpoint is durable. One is written at a time: the next ``SaveCheckpoint`` waits for it.
* ``PublishWeights`` is answered when the weights are copied, where their transport looks at the copy by itself, and
  again when engines can fetch them. The next one waits for that.
* Each other command is answered by exactly one event; ``ReleaseWeights`` and ``DeleteCheckpoints`` by none.
* Asleep it has nothing on its device. Learner and engines on a CPU share its memory anyway, so there nothing is moved.
* ``Train`` makes exactly the next version. What is published or saved is the current one.

| wait | who ends it |
|---|---|
| at a second checkpoint and at the end, for the writer | the writer; its thread ends with the process |
| at a second export and at the end, for a digest | the threads that make it |
| in a command, for the other ranks | they do; at the latest the timeout of the :class:`.WorkerGroup` |
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, assert_never

from penstock.backends.learners.checkpoints.names import checkpoint_in
from penstock.backends.learners.learning_rate import is_reference_due
from penstock.backends.learners.training.exports import ExportsUnderWay
from penstock.backends.learners.training.metrics import StepTimes, as_metrics
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
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.training.batch_trainer import BatchTrainer
    from penstock.backends.learners.worker_group.words import LearnerAnswer
    from penstock.backends.learners.worker_group.worker import WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import BegunExport, WeightExporter

SEPARATE_MEMORY: Final = ("cuda",)
"""Devices whose memory is not the host's: only there anything is moved when the learner sleeps."""


TrainerT = TypeVar("TrainerT", bound="BatchTrainer")


@dataclass(slots=True, kw_only=True)
class Opened(Generic[TrainerT]):
    """What every learner has from ``OpenLearner`` on."""

    trainer: TrainerT
    canary: tuple[int, ...]
    reference_version: int = 0
    """Which policy the reference is."""
    version: int = 0
    trained_tokens: int = 0
    is_asleep: bool = False


class Published(NamedTuple):
    """What came of publishing weights."""

    export: BegunExport | WeightManifest | None
    """None on every rank but the first."""
    figures: Mapping[str, float]


OpenedT = TypeVar("OpenedT", bound="Opened[Any]")


class CommandWorker(ABC, Generic[OpenedT]):
    """One rank of a learner, or all of it; see :class:`.LearnerWorker`."""

    def __init__(
        self, plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost, exporter: WeightExporter | None
    ) -> None:
        """
        Args:
            plan: of the learner.
            workers: all ranks.
            host: the process.
            exporter: None on every rank but the first.
        """
        self._plan = plan
        self._options = plan.options
        self._folder = Path(plan.checkpoints_folder)
        self._workers = workers
        self._host = host
        self._exporter = exporter
        self._exports = ExportsUnderWay(done=host.emit, fail=host.fail)
        self._opened: OpenedT | None = None
        self._figures: dict[str, float] = {}
        self._notices: tuple[str, ...] = ()
        """What people should know of how it was opened."""
        self._times = StepTimes()

    # --- what each library does in its own way ----------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> OpenedT:
        """From the model of the scenario."""

    @abstractmethod
    def _resume(self, folder: Path, version: int) -> OpenedT:
        """From the checkpoint in this folder, which has to be of this version."""

    @abstractmethod
    def _refresh_reference(self, opened: OpenedT) -> bool:
        """Make the reference the policy as it is; False if the learner has none."""

    @abstractmethod
    def _published(self, opened: OpenedT, command: PublishWeights) -> Published:
        """Gather the weights, and export them on the first rank."""

    @abstractmethod
    def _begin_save(self, opened: OpenedT) -> None:
        """Copy the state, and have it written."""

    @abstractmethod
    def _fall_asleep(self, opened: OpenedT) -> None:
        """Move everything off the device."""

    @abstractmethod
    def _wake_up(self, opened: OpenedT) -> None:
        """Move it back."""

    @property
    @abstractmethod
    def _saved(self) -> CheckpointWritten:
        """The last checkpoint that is durable."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no checkpoint is being written."""

    @abstractmethod
    def _delete_checkpoints(self, below_version: int) -> None:
        """On the first rank."""

    # --- LearnerWorker ----------------------------------------------------------------------------------------

    def carry_out(self, command: LearnerCommand, /) -> LearnerAnswer | None:
        """See :class:`.LearnerWorker`."""
        with self._times.at_work():
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
                    if self._workers.is_first:
                        self._delete_checkpoints(command.below_version)
                    return None
                case SleepLearner():
                    return self._sleep()
                case WakeLearner():
                    return self._wake()
                case _:
                    assert_never(command)

    def finish(self) -> None:
        """See :class:`.LearnerWorker`."""
        self._exports.wait()
        if self._exporter is not None:
            self._exporter.close()
        self.settle()

    def _open(self, command: OpenLearner) -> LearnerOpened:
        if self._opened is not None:
            raise ValueError("OpenLearner came twice; a learner is opened once")
        if not command.path and command.version:
            raise ValueError(f"OpenLearner names version {command.version} and no checkpoint of it")
        if command.path:
            self._opened = self._resume(checkpoint_in(self._folder, command.path), command.version)
            self._report({"learner/trained_tokens": self._opened.trained_tokens})
        else:
            self._opened = self._begin()
        self._times.begin()
        return LearnerOpened(version=self._opened.version, notices=self._notices)

    def _train(self, command: Train) -> BatchTrained:
        opened = self._ready(command.version - 1, "Train", awake=True)
        trainer: BatchTrainer = opened.trainer
        result = trainer.train(
            command.groups,
            version=command.version,
            min_token_version=command.min_token_version,
            mask_old_tokens=command.mask_old_tokens,
        )
        opened.version = command.version
        if is_reference_due(command.version, self._options) and self._refresh_reference(opened):
            opened.reference_version = command.version
        opened.trained_tokens += result.num_trained_tokens
        self._report({"learner/trained_tokens": opened.trained_tokens, "learner/step_time_s": result.step_time_s})
        return BatchTrained(
            version=command.version,
            num_trained_tokens=result.num_trained_tokens,
            num_masked_tokens=result.num_masked_tokens,
            metrics=(*result.metrics, *as_metrics(self._times.end())),
            notices=result.notices,
        )

    def _publish(self, command: PublishWeights) -> WeightsPublished | None:
        self._exports.wait()
        published = self._published(self._ready(command.version, "PublishWeights", awake=True), command)
        if published.figures:
            self._report(published.figures)
        if isinstance(published.export, WeightManifest):
            return WeightsPublished(manifest=published.export)
        if published.export is not None:
            self._exports.begin(published.export, command.version)
        return None

    def _save(self, command: SaveCheckpoint) -> CheckpointWritten | None:
        opened = self._ready(command.version, "SaveCheckpoint")
        self.settle()
        self._host.check_stop()
        if self._saved.version == command.version:
            return self._saved
        began_s = time.perf_counter()
        self._begin_save(opened)
        self._report({"learner/snapshot_time_s": time.perf_counter() - began_s})
        return None

    def _sleep(self) -> LearnerSlept:
        opened = self._checked("SleepLearner", is_asleep=False)
        began_s = time.perf_counter()
        if self._workers.device.type in SEPARATE_MEMORY:
            self._fall_asleep(opened)
        opened.is_asleep = True
        self._report({"learner/sleep_time_s": time.perf_counter() - began_s})
        return LearnerSlept()

    def _wake(self) -> LearnerWoken:
        opened = self._checked("WakeLearner", is_asleep=True)
        began_s = time.perf_counter()
        if self._workers.device.type in SEPARATE_MEMORY:
            self._wake_up(opened)
        opened.is_asleep = False
        self._report({"learner/wake_time_s": time.perf_counter() - began_s})
        return LearnerWoken()

    def _checked(self, command: str, *, is_asleep: bool) -> OpenedT:
        if self._opened is None or self._opened.is_asleep != is_asleep:
            found = "has not opened yet" if self._opened is None else "sleeps" if self._opened.is_asleep else "is awake"
            raise ValueError(f"{command} came to a learner that {found}")
        return self._opened

    def _ready(self, version: int, command: str, *, awake: bool = False) -> OpenedT:
        if self._opened is None:
            raise ValueError(f"{command} came before OpenLearner")
        if awake:
            self._checked(command, is_asleep=False)
        if self._opened.version != version:
            raise ValueError(f"{command} needs the learner at version {version}, and it is at {self._opened.version}")
        return self._opened

    def _report(self, figures: Mapping[str, float]) -> None:
        self._figures |= figures
        self._host.show(as_metrics(self._figures))
