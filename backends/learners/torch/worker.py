"""A learner that trains with torch.

Invariants:

* See :mod:`penstock.backends.learners.training.command_worker`. The first rank alone writes checkpoints.
* Asleep it is copied from the host's memory when a checkpoint is asked for.
* A rank that holds the critic alone (:mod:`.roles`) trains and saves it, takes part in writing the rest, and publishes
  nothing. It begins with the policy's weights as they are before the first batch, which it finds by itself.
"""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.device_memory import ParkedMemory
from penstock.backends.learners.batch.sequences import demonstration_sequences
from penstock.backends.learners.checkpoints.channel import CheckpointChannel
from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, check_dtype, read_record
from penstock.backends.learners.checkpoints.shards import local_of
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.checkpoints.writer import CheckpointWriter
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.torch.adapter_publishing import AdapterPublisher
from penstock.backends.learners.torch.kept_warm_start import warm_start_or_kept
from penstock.backends.learners.torch.model import CheckpointError, PackedModel
from penstock.backends.learners.torch.parallel import parallelize
from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.learners.torch.reference import frozen, new_reference, refresh
from penstock.backends.learners.torch.roles import is_held, roles_of
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.snapshot import restore_random_state, take_snapshot
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.training.canary import canary_under, choose_canary
from penstock.backends.learners.training.command_worker import CommandWorker, Opened, Published
from penstock.backends.learners.training.exports import begin_export
from penstock.backends.learners.worker_group.planned import exporter_of
from penstock.messages.local import CheckpointWritten

if TYPE_CHECKING:
    from penstock.backends.learners.checkpoints.record import CheckpointRecord
    from penstock.backends.learners.options import LoraOptions
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.worker import WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.commands import PublishWeights

_log: Final = logging.getLogger(__name__)


def open_torch_worker(plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost) -> TorchWorker:
    """What works in a rank of this learner; the first rank publishes the weights.

    Raises:
        WeightExportError: they cannot be published there.
    """
    return TorchWorker(plan, workers, host, exporter_of(plan, workers))


@dataclass(slots=True, kw_only=True)
class OpenedLearner(Opened[PolicyTrainer]):
    """What exists from ``OpenLearner`` on."""

    model: PackedModel
    reference: PackedModel | None
    parked: ParkedMemory | None = None
    """While it sleeps, on a device of its own memory."""

    @property
    def own_reference(self) -> PackedModel | None:
        """The reference, if it is not the policy without its adapters."""
        return None if self.reference is None or self.reference.model is self.model.model else self.reference


class TorchWorker(CommandWorker[OpenedLearner]):
    """One rank of the learner, or all of it."""

    def __init__(
        self, plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost, exporter: WeightExporter | None
    ) -> None:
        super().__init__(plan, workers, host, exporter)
        self._roles = roles_of(workers, plan.options)
        self._model_folder = Path(plan.model_folder)
        self._checkpoints = CheckpointFolder(
            self._folder,
            epoch=plan.epoch,
            tokenizer_source=self._model_folder,
            channel=CheckpointChannel(workers),
        )
        self._writer = CheckpointWriter(self._checkpoints, done=host.emit, fail=host.fail)
        lora = plan.options.lora
        is_adapter = lora is not None and lora.publish == "adapter"
        self._adapter_publisher = AdapterPublisher(workers, exporter) if is_adapter else None

    def settle(self) -> None:
        self._writer.wait()

    @property
    def _saved(self) -> CheckpointWritten:
        return self._writer.saved

    def _delete_checkpoints(self, below_version: int) -> None:
        self._checkpoints.delete_below(below_version)

    def _begin(self) -> OpenedLearner:
        plan = self._plan
        torch.manual_seed(plan.seed)
        lora = plan.options.lora
        if lora is None or plan.options.warm_start is None:
            model = self._loaded(self._model_folder, lora)
            self._warm_start(model)
        else:
            # All of its weights are trained first, and then none of them.
            model = PackedModel.load(self._model_folder, dtype=plan.dtype, device=self._workers.device)
            self._warm_start(model)
            model.adapt(lora)
            parallelize(model, self._roles.own, plan.options)
        reference = new_reference(model, plan.options, self._roles.own) if self._roles.has_policy else None
        trainer = self._trainer(model, reference)
        self._notices += model.notices
        canary = choose_canary(model) if self._roles.has_policy else ()
        return OpenedLearner(model=trainer.model, trainer=trainer, reference=reference, canary=canary)

    def _resume(self, folder: Path, version: int) -> OpenedLearner:
        plan = self._plan
        torch.manual_seed(plan.seed)
        record = read_record(folder, version=version, rank=self._workers.rank, num_ranks=self._workers.num_ranks)
        if record.backend != "torch":
            raise CheckpointError(
                f"{folder}: learner.backend is torch, and the {record.backend} learner wrote it; resume with "
                f"learner.backend={record.backend}, or start a new run from its model (penstock convert; model.path)"
            )
        check_dtype(folder, record, plan.dtype)
        if plan.options.lora is None:
            model = self._loaded(folder)
            reference = self._stored_reference(folder, record)
        else:
            model = self._loaded(_base_folder(folder, record), plan.options.lora)
            reference = new_reference(model, plan.options, self._roles.own)
        trainer = self._trainer(model, reference)
        tensors = load_state(
            folder / STATE_FOLDER, trainer.layouts(), is_wanted=lambda name: is_held(name, self._roles)
        )
        trainer.restore(tensors)
        restore_random_state(tensors, self._workers)
        self._notices += model.notices
        if folder.parent.resolve() == self._folder.resolve():
            self._checkpoints.reference = record.reference
        self._writer.saved = CheckpointWritten(version=record.version, path=str(folder))
        return OpenedLearner(
            model=trainer.model,
            trainer=trainer,
            reference=reference,
            reference_version=0 if record.reference is None else record.reference.version,
            canary=record.canary,
            version=record.version,
            trained_tokens=record.trained_tokens,
        )

    def _stored_reference(self, folder: Path, record: CheckpointRecord) -> PackedModel | None:
        plan = self._plan
        objective = plan.options.objective
        if not (self._roles.has_policy and needs_reference(objective)):
            return None
        if record.reference is None:
            asked = f"learner.objective.kl_coef is {objective.kl_coef}" if objective.kl_coef else "DPO has a reference"
            raise CheckpointError(
                f"{folder}: {asked}, and the checkpoint was written without a reference because its objective had "
                "none; resume with that one (kl_coef: 0)"
            )
        return frozen(self._loaded(folder.parent / record.reference.folder))

    def _loaded(self, folder: Path, lora: LoraOptions | None = None) -> PackedModel:
        """A model, divided over the ranks that hold what this one holds."""
        return load_divided(folder, self._roles.own, self._plan.options, dtype=self._plan.dtype, lora=lora)

    def _trainer(self, model: PackedModel, reference: PackedModel | None) -> PolicyTrainer:
        plan = self._plan
        if plan.options.true_on_policy and self._workers.device.type == "cpu":  # on GPUs engines have other kernels
            model.compute_as_engine(plan.max_context)
        return PolicyTrainer(
            model,
            plan.options,
            temperature=plan.temperature,
            num_steps=plan.num_steps,
            reference=reference if needs_reference(plan.options.objective) else None,
            check_stop=self._host.check_stop,
            seed=plan.seed,
            workers=self._workers,
            roles=self._roles,
            run_folder=plan.run_folder,
            quantizes=plan.export.quantizes,
        )

    def _warm_start(self, model: PackedModel) -> None:
        block = self._plan.options.warm_start
        if block is None:
            return
        sequences = demonstration_sequences(self._plan.demonstration_ids(), model.check_length)
        self._report({"learner/warm_start_fraction": 0.0})
        notice = warm_start_or_kept(
            model,
            sequences,
            self._plan.options,
            block,
            seed=self._plan.seed,
            report=lambda fraction, loss: self._report(
                {"learner/warm_start_fraction": fraction, "learner/warm_start_loss": loss}
            ),
            check_stop=self._host.check_stop,
            workers=self._roles.own,
        )
        self._notices += (notice,) if notice else ()

    def _refresh_reference(self, opened: OpenedLearner) -> bool:
        if opened.reference is None:
            return self._has_reference(opened)  # elsewhere, perhaps
        # A checkpoint may be in the writing whose reference is the one that lies in this memory.
        self.settle()
        self._host.check_stop()
        refresh(opened.reference, opened.model)
        return True

    def _published(self, opened: OpenedLearner, command: PublishWeights) -> Published:
        if not self._roles.has_policy:
            return Published(None, {})
        # Every rank computes it: a model that is divided can only be run by all of them.
        canary = canary_under(opened.model, opened.canary)
        # Likewise; and its weights are gathered from all of them.
        if self._adapter_publisher is not None:
            assert opened.reference is not None, "a model with adapters has one"
            return Published(
                self._adapter_publisher.publish(
                    opened.model, opened.reference, version=command.version, publish=command.publish, canary=canary
                ),
                {},
            )
        weights = GatheredWeights(opened.model, self._roles.own)
        export = None
        if self._exporter is not None:
            export = begin_export(
                self._exporter, weights, version=command.version, publish=command.publish, canary=canary
            )
        weights.finish()
        return Published(export, {})

    def _begin_save(self, opened: OpenedLearner) -> None:
        snapshot = take_snapshot(
            opened.model,
            opened.trainer,
            opened.reference,
            version=opened.version,
            dtype=self._plan.dtype,
            trained_tokens=opened.trained_tokens,
            canary=opened.canary,
            reference_version=opened.reference_version if self._has_reference(opened) else None,
            keeps_reference=not self._checkpoints.has_reference(opened.reference_version),
            parked=opened.parked,
        )
        self._writer.begin(snapshot)

    def _has_reference(self, opened: OpenedLearner) -> bool:
        """Whether the learner has one, on this rank or on others."""
        is_elsewhere = not self._roles.has_policy and needs_reference(self._plan.options.objective)
        return opened.reference is not None or is_elsewhere

    def _fall_asleep(self, opened: OpenedLearner) -> None:
        self._await_reference(opened)
        if opened.own_reference is not None:
            opened.own_reference.model.to("cpu")  # type: ignore[arg-type]  # to() is decorated without types
        model = opened.model.model
        tensors = (*model.parameters(), *model.buffers(), *opened.trainer.state().values())
        on_device = [local_of(tensor) for tensor in tensors if tensor.device == opened.model.device]
        opened.parked = ParkedMemory(on_device, keeps_values=True)
        _log.info("asleep: %d bytes are on the host", opened.parked.size_bytes)

    def _wake_up(self, opened: OpenedLearner) -> None:
        self._await_reference(opened)
        if opened.parked is not None:
            opened.parked.restore()
            opened.parked = None
        if opened.own_reference is not None:
            opened.own_reference.model.to(self._workers.device)  # type: ignore[arg-type]  # likewise

    def _await_reference(self, opened: OpenedLearner) -> None:
        """A reference that is not on disk yet is written as it lies in memory, so it must not move meanwhile."""
        if opened.reference is not None and not self._checkpoints.has_reference(opened.reference_version):
            self.settle()


def _base_folder(folder: Path, record: CheckpointRecord) -> Path:
    """What the adapters of a checkpoint belong to."""
    if record.reference is None:
        raise CheckpointError(
            f"{folder}: written without learner.lora, so no model lies beside it that adapters could belong to; "
            "resume without learner.lora, or start a new run from its model (model.path)"
        )
    return folder.parent / record.reference.folder
