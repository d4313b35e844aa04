"""Carries out the learner's commands with torch, one after the other, on the thread that calls it.

Invariants:

* Every rank of a gang carries out the same commands in the same order. The first rank alone exports weights and writes
  checkpoints, and its answers are the learner's; what the others return is not looked at.
* ``SaveCheckpoint`` copies the state between two steps; what follows does not wait for the disk. It is answered when
  the checkpoint is durable. One is written at a time: the next ``SaveCheckpoint`` waits for it.
* Each other command is answered by exactly one event; ``ReleaseWeights`` and ``DeleteCheckpoints`` by none.
* Asleep it has nothing on its device; checkpoints are copied from the host's memory then. Learner and engines on a CPU
  share its memory anyway, so there nothing is moved.
* ``Train`` makes exactly the next version. What is published or saved is the current one.

| wait | who ends it |
|---|---|
| at a second checkpoint and at the end, for the writer | the writer; its thread ends with the process |
| in a step, for the other ranks | they do; at the latest the timeout of the :class:`.Gang` |
"""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import torch

from penstock.backends.device_memory import ParkedMemory
from penstock.backends.learners.canary import choose_canary
from penstock.backends.learners.checkpoints.channel import CheckpointChannel
from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, read_record
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.checkpoints.writer import CheckpointWriter
from penstock.backends.learners.metrics import as_metrics
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.schedule import is_reference_due
from penstock.backends.learners.sequences import demonstration_sequences
from penstock.backends.learners.torch.canary import canary_under
from penstock.backends.learners.torch.model import CheckpointError, PackedModel
from penstock.backends.learners.torch.parallel import gathered, loading_device, parallelize
from penstock.backends.learners.torch.reference import frozen, new_reference, refresh
from penstock.backends.learners.torch.shards import local_of
from penstock.backends.learners.torch.snapshot import restore_random_state, take_snapshot
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.torch.warm_start import warm_start
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
    from collections.abc import Sequence

    from penstock.backends.learners.checkpoints.record import CheckpointRecord
    from penstock.backends.learners.gang.gang import Gang
    from penstock.backends.learners.gang.words import LearnerAnswer
    from penstock.backends.learners.gang.worker import WorkerHost
    from penstock.backends.learners.options import LearnerOptions, LoraOptions
    from penstock.backends.weights.protocol import WeightExporter

Demonstration = tuple["Sequence[int]", "Sequence[int]"]
"""Token ids of a prompt and of a response, the end token included."""

SEPARATE_MEMORY: Final = ("cuda",)
"""Devices whose memory is not the host's: only there anything is moved when the learner sleeps."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """What a learner is made from; see :func:`.open_torch_learner`."""

    model_folder: Path
    checkpoints_folder: Path
    options: LearnerOptions
    temperature: float
    dtype: str
    seed: int
    num_steps: int
    epoch: int
    exporter: WeightExporter | None
    """None on every rank but the first."""
    demonstrations: Sequence[Demonstration]


@dataclass(slots=True)
class OpenedLearner:
    """What exists from ``OpenLearner`` on."""

    model: PackedModel
    trainer: PolicyTrainer
    reference: PackedModel | None
    reference_version: int
    """Which policy the reference is."""
    canary: tuple[int, ...]
    version: int = 0
    trained_tokens: int = 0
    is_asleep: bool = False
    parked: ParkedMemory | None = None
    """While it sleeps, on a device of its own memory."""


class TorchWorker:
    """One rank of the learner, or all of it."""

    def __init__(self, setup: LearnerSetup, gang: Gang, host: WorkerHost) -> None:
        self._setup = setup
        self._gang = gang
        self._host = host
        self._checkpoints = CheckpointFolder(
            setup.checkpoints_folder,
            epoch=setup.epoch,
            tokenizer_source=setup.model_folder,
            channel=CheckpointChannel(gang),
        )
        self._writer = CheckpointWriter(self._checkpoints, done=host.emit, fail=host.fail)
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
                if self._setup.exporter is not None:
                    self._setup.exporter.release(command.below_version)
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
        if self._setup.exporter is not None:
            self._setup.exporter.close()
        self.settle()

    def settle(self) -> None:
        """Wait until no checkpoint is being written."""
        self._writer.wait()

    def _open(self, command: OpenLearner) -> LearnerOpened:
        if self._opened is not None:
            raise ValueError("OpenLearner came twice; a learner is opened once")
        if not command.path and command.version:
            raise ValueError(f"OpenLearner names version {command.version} and no checkpoint of it")
        torch.manual_seed(self._setup.seed)
        self._opened = self._resume(command) if command.path else self._begin()
        return LearnerOpened(version=self._opened.version)

    def _begin(self) -> OpenedLearner:
        setup = self._setup
        if setup.options.lora is None:
            model = self._loaded(setup.model_folder)
            self._warm_start(model)
        else:
            # All of its weights are trained first, and then none of them.
            model = PackedModel.load(setup.model_folder, dtype=setup.dtype, device=self._gang.device)
            self._warm_start(model)
            self._adapt(model, setup.options.lora)
        reference = new_reference(model, setup.options, self._gang)
        trainer = self._trainer(model, reference)
        return OpenedLearner(
            model=model, trainer=trainer, reference=reference, reference_version=0, canary=choose_canary(model)
        )

    def _resume(self, command: OpenLearner) -> OpenedLearner:
        setup, folder = self._setup, Path(command.path)
        record = read_record(folder, version=command.version, rank=self._gang.rank, num_ranks=self._gang.num_ranks)
        if record.backend != "torch":
            raise CheckpointError(
                f"{folder}: learner.backend is torch, and the {record.backend} learner wrote it; resume with "
                f"learner.backend={record.backend}, or start a new run from its model (penstock convert; model.path)"
            )
        if record.dtype != setup.dtype:
            raise CheckpointError(
                f"{folder}: expected a model of {setup.dtype}, as model.dtype says, found {record.dtype}; resume with "
                f"model.dtype: {record.dtype}"
            )
        if setup.options.lora is None:
            model = self._loaded(folder)
            reference = self._stored_reference(folder, record)
        else:
            model = self._stored_base(folder, record)
            self._adapt(model, setup.options.lora)
            reference = new_reference(model, setup.options, self._gang)
        trainer = self._trainer(model, reference)
        tensors = load_state(folder / STATE_FOLDER, trainer.layouts())
        trainer.restore(tensors)
        restore_random_state(tensors, self._gang)
        if folder.parent.resolve() == setup.checkpoints_folder.resolve():
            self._checkpoints.reference = record.reference
        self._writer.saved = CheckpointWritten(version=record.version, path=str(folder))
        self._report({"learner/trained_tokens": record.trained_tokens})
        return OpenedLearner(
            model=model,
            trainer=trainer,
            reference=reference,
            reference_version=0 if record.reference is None else record.reference.version,
            canary=record.canary,
            version=record.version,
            trained_tokens=record.trained_tokens,
        )

    def _stored_reference(self, folder: Path, record: CheckpointRecord) -> PackedModel | None:
        setup = self._setup
        objective = setup.options.objective
        if not needs_reference(objective):
            return None
        if record.reference is None:
            asked = f"learner.objective.kl_coef is {objective.kl_coef}" if objective.kl_coef else "DPO has a reference"
            raise CheckpointError(
                f"{folder}: {asked}, and the checkpoint was written without a reference because its objective had "
                "none; resume with that one (kl_coef: 0)"
            )
        return frozen(self._loaded(folder.parent / record.reference.folder))

    def _stored_base(self, folder: Path, record: CheckpointRecord) -> PackedModel:
        """What the adapters of a checkpoint belong to."""
        if record.reference is None:
            raise CheckpointError(
                f"{folder}: written without learner.lora, so no model lies beside it that adapters could belong to; "
                "resume without learner.lora, or start a new run from its model (model.path)"
            )
        base = folder.parent / record.reference.folder
        return PackedModel.load(base, dtype=self._setup.dtype, device=loading_device(self._gang, self._setup.options))

    def _adapt(self, model: PackedModel, options: LoraOptions) -> None:
        """Give a whole model adapters, and divide it over the ranks."""
        model.adapt(options)
        parallelize(model, self._gang, self._setup.options)

    def _loaded(self, folder: Path) -> PackedModel:
        """A model, divided over the ranks."""
        options = self._setup.options
        model = PackedModel.load(folder, dtype=self._setup.dtype, device=loading_device(self._gang, options))
        parallelize(model, self._gang, options)
        return model

    def _trainer(self, model: PackedModel, reference: PackedModel | None) -> PolicyTrainer:
        setup = self._setup
        return PolicyTrainer(
            model,
            setup.options,
            temperature=setup.temperature,
            num_steps=setup.num_steps,
            reference=reference if needs_reference(setup.options.objective) else None,
            check_stop=self._host.check_stop,
            seed=setup.seed,
            gang=self._gang,
        )

    def _warm_start(self, model: PackedModel) -> None:
        block = self._setup.options.warm_start
        if block is None:
            return
        sequences = demonstration_sequences(self._setup.demonstrations, model.check_length)
        self._report({"learner/warm_start_fraction": 0.0})
        warm_start(
            model,
            sequences,
            self._setup.options,
            block,
            seed=self._setup.seed,
            report=lambda fraction, loss: self._report(
                {"learner/warm_start_fraction": fraction, "learner/warm_start_loss": loss}
            ),
            check_stop=self._host.check_stop,
            gang=self._gang,
        )

    def _train(self, command: Train) -> BatchTrained:
        opened = self._ready(command.version - 1, "Train", awake=True)
        result = opened.trainer.train(
            command.groups, version=command.version, min_token_version=command.min_token_version
        )
        opened.version = command.version
        if opened.reference is not None and is_reference_due(command.version, self._setup.options):
            # A checkpoint may be in the writing whose reference is the one that lies in this memory.
            self._writer.wait()
            self._host.check_stop()
            refresh(opened.reference, opened.model)
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
        # Every rank computes it: a model that is divided can only be run by all of them.
        canary = canary_under(opened.model, opened.canary)
        # Likewise; and its weights are gathered from all of them.
        tensors = gathered(opened.model, is_wanted=self._setup.exporter is not None)
        if self._setup.exporter is None:
            return None
        manifest = self._setup.exporter.export(tensors, version=command.version, publish=command.publish, canary=canary)
        return WeightsPublished(manifest=manifest)

    def _save(self, command: SaveCheckpoint) -> CheckpointWritten | None:
        opened = self._ready(command.version, "SaveCheckpoint")
        self._writer.wait()
        self._host.check_stop()
        if self._writer.saved.version == command.version:
            return self._writer.saved
        began_s = time.perf_counter()
        snapshot = take_snapshot(
            opened.model,
            opened.trainer,
            opened.reference,
            gang=self._gang,
            version=opened.version,
            dtype=self._setup.dtype,
            trained_tokens=opened.trained_tokens,
            canary=opened.canary,
            reference_version=opened.reference_version,
            keeps_reference=not self._checkpoints.has_reference(opened.reference_version),
            parked=opened.parked,
        )
        self._report({"learner/snapshot_time_s": time.perf_counter() - began_s})
        self._writer.begin(snapshot)
        return None

    def _sleep(self) -> LearnerSlept:
        opened = self._checked("SleepLearner", is_asleep=False)
        self._await_reference()
        began_s = time.perf_counter()
        if self._gang.device.type in SEPARATE_MEMORY:
            if opened.reference is not None and opened.reference.model is not opened.model.model:
                opened.reference.model.to("cpu")  # type: ignore[arg-type]  # to() is decorated without types
            model = opened.model.model
            tensors = (*model.parameters(), *model.buffers(), *opened.trainer.state().values())
            on_device = [local_of(tensor) for tensor in tensors if tensor.device == opened.model.device]
            opened.parked = ParkedMemory(on_device, keeps_values=True)
            _log.info("asleep: %d bytes are on the host", opened.parked.size_bytes)
        opened.is_asleep = True
        self._report({"learner/sleep_time_s": time.perf_counter() - began_s})
        return LearnerSlept()

    def _wake(self) -> LearnerWoken:
        opened = self._checked("WakeLearner", is_asleep=True)
        self._await_reference()
        began_s = time.perf_counter()
        if opened.parked is not None:
            opened.parked.restore()
            opened.parked = None
            if opened.reference is not None and opened.reference.model is not opened.model.model:
                opened.reference.model.to(self._gang.device)  # type: ignore[arg-type]  # likewise
        opened.is_asleep = False
        self._report({"learner/wake_time_s": time.perf_counter() - began_s})
        return LearnerWoken()

    def _checked(self, command: str, *, is_asleep: bool) -> OpenedLearner:
        if self._opened is None or self._opened.is_asleep != is_asleep:
            found = "has not opened yet" if self._opened is None else "sleeps" if self._opened.is_asleep else "is awake"
            raise ValueError(f"{command} came to a learner that {found}")
        return self._opened

    def _await_reference(self) -> None:
        """A reference that is not on disk yet is written as it lies in memory, so it must not move meanwhile."""
        opened = self._opened
        if opened is None or opened.reference is None:
            return
        if not self._checkpoints.has_reference(opened.reference_version):
            self._writer.wait()

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
