"""Checkpoints of a run that Megatron trains, as one rank of one incarnation of its learner writes and reads them.

Invariants:

* What is saved is copied between two steps; it is written while training goes on, one checkpoint at a time, and
  answered when it is durable. Folders appear, and go, as :class:`.CheckpointFolder` says.
* What is read has been compared with its record before; what cannot be gone on with is refused in one sentence, before
  a model is built.
* Weights fit into any layout of the same model, and so does what the optimizer keeps, unless it is divided over
  data-parallel ranks now and was not then, or the other way round. Where it does not fit the checkpoint is refused, or,
  with ``learner.optimizer: fresh``, an optimizer begins that has seen nothing.

| wait | who ends it |
|---|---|
| ``begin_save`` and ``wait``, for the checkpoint before | the thread that writes it; at the latest the timeout of its channel |
| ``begin_save`` and loading, for the other ranks | they come to the same place; at the latest the timeout of the process group |
"""  # noqa: E501

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.checkpoints.channel import CheckpointChannel
from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, CheckpointError, check_dtype, read_record
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.checkpoints.writer import CheckpointWriter
from penstock.backends.learners.megatron.bridge.families import MTP_BLOCK
from penstock.backends.learners.megatron.checkpoint.checkpoint_snapshot import OWN_TENSOR, POLICY, take_snapshot
from penstock.backends.learners.megatron.checkpoint.dist_format import DistReader, is_distributed
from penstock.backends.learners.megatron.checkpoint.sharded import load_model, load_optimizer
from penstock.backends.learners.megatron.weights.load import load_weights
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.torch.snapshot import restore_random_state
from penstock.backends.learners.training.roles import side_by_side
from penstock.messages.local import CheckpointWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.checkpoints.record import CheckpointRecord, LearnerFacts
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.offload import SleepingMemory
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.training.roles import Roles
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.protocol import Fail

__all__ = ["POLICY", "MegatronCheckpoints", "StoredCheckpoint", "read_weights"]

_log: Final = logging.getLogger(__name__)


class StoredCheckpoint:
    """A checkpoint that has been checked against its record. Every rank reads it, in the same order: weights, then,
    when a :class:`.TrainableModel` has copied them, its optimizer."""

    def __init__(self, folder: Path, record: CheckpointRecord, roles: Roles, *, is_fresh: bool) -> None:
        self._folder = folder
        self._roles = roles
        self.record = record
        self.is_fresh = is_fresh
        """Whether what the optimizer had is left behind."""

    def load_weights(self, model: ParallelModel, name: str = POLICY) -> None:
        """A collective.

        Raises:
            CheckpointError: it has no such model, or layers that predict further tokens and the model has none.
        """
        if name == POLICY and not model.architecture.num_mtp_layers and has_further_layers(self._folder / name):
            raise CheckpointError(
                f"{self._folder}: has trained layers that predict further tokens, and learner.megatron.mtp is null, "
                "so they would be lost; resume with the key that it was written with"
            )
        read_weights(model, self._folder, rank=self._roles.own.rank, name=name)

    def load_reference(self, model: ParallelModel) -> None:
        """A collective.

        Raises:
            CheckpointError: it was written without one.
        """
        reference = self.record.reference
        if reference is None:
            raise CheckpointError(
                f"{self._folder}: the objective has a reference, and the checkpoint was written without one because "
                "its objective had none; resume with that one (kl_coef: 0)"
            )
        read_weights(model, self._folder.parent / reference.folder, rank=self._roles.own.rank)

    def load_optimizer(self, trainable: TrainableModel, name: str = POLICY) -> None:
        """What the optimizer keeps, unless it ``is_fresh``. A collective.

        Raises:
            CheckpointError: the checkpoint does not have it.
        """
        if self.is_fresh:
            return
        stored = self.record.megatron
        assert stored is not None, "any other is left behind"
        if name not in stored.optimizer_steps:
            raise CheckpointError(f"{self._folder}: was written without a {name}; resume with the objective of the run")
        load_optimizer(trainable, self._folder / name, num_steps=stored.optimizer_steps[name])

    def tensors(self) -> dict[str, Tensor]:
        """Those that :meth:`.MegatronCheckpoints.begin_save` was given as such, on the host."""
        if self.record.backend != "megatron":
            return {}
        found = load_state(self._folder / STATE_FOLDER, is_wanted=lambda name: name.startswith(OWN_TENSOR))
        return {name.removeprefix(OWN_TENSOR): tensor for name, tensor in found.items()}

    def restore_random_state(self) -> None:
        """Go on with the random numbers of the checkpoint, unless the torch learner wrote it."""
        if self.record.backend == "megatron":
            tensors = load_state(self._folder / STATE_FOLDER, is_wanted=lambda name: name.startswith("random/"))
            restore_random_state(tensors, self._roles.everyone)


class MegatronCheckpoints:
    """Of each rank one thread calls it."""

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int,
        model_folder: Path,
        workers: WorkerGroup,
        options: LearnerOptions,
        done: Callable[[CheckpointWritten], None],
        fail: Fail,
        roles: Roles | None = None,
        channel: CheckpointChannel | None = None,
    ) -> None:
        """A collective.

        Args:
            folder: of all checkpoints of the run.
            epoch: of this incarnation.
            model_folder: whose config and tokenizer every checkpoint gets.
            workers: all ranks.
            options: the ``learner:`` block.
            done: called on a thread of its own when a checkpoint is durable.
            fail: called there when it cannot be written.
            roles: which of the ranks hold what; None: all hold whatever there is.
            channel: to all other ranks; None: one is made.
        """
        self._own_folder = folder
        self._model_folder = model_folder
        self._workers = workers
        self._options = options
        self._roles = roles or side_by_side(workers, has_critic=options.objective.critic != "none")
        channel = channel or CheckpointChannel(workers)
        self._own_channel = CheckpointChannel(self._roles.own) if self._roles.are_apart else channel
        self._folder = CheckpointFolder(folder, epoch=epoch, tokenizer_source=model_folder, channel=channel)
        self._writer = CheckpointWriter(self._folder, done=done, fail=fail)

    @property
    def saved(self) -> CheckpointWritten:
        """The newest that lies on disk whole; wait first."""
        return self._writer.saved

    def begin_save(
        self,
        trainables: Mapping[str, TrainableModel],
        facts: LearnerFacts,
        *,
        reference: ParallelModel | None,
        tensors: Mapping[str, Tensor] | None = None,
        asleep: SleepingMemory | None = None,
    ) -> None:
        """Copy everything, and write it in the background. Waits for the checkpoint before. A collective.

        Args:
            trainables: that this rank has, by name: the policy as ``policy``, a critic of its own as ``critic``.
            facts: the rest.
            reference: is copied where it does not lie on disk yet; None without one, and where other ranks have it.
            tensors: small ones, the same on every rank, that belong to no model.
            asleep: what has the memory of all of these while the learner sleeps.
        """
        self._writer.wait()
        is_elsewhere = not self._roles.has_policy and needs_reference(self._options.objective)
        has_reference = reference is not None or is_elsewhere
        snapshot = take_snapshot(
            trainables,
            facts if has_reference else facts._replace(reference_version=None),
            reference=reference,
            keeps_reference=not self._folder.has_reference(facts.reference_version),
            tensors=tensors or {},
            model_folder=self._model_folder,
            roles=self._roles,
            own_channel=self._own_channel,
            distributed_optimizer=self._options.megatron.distributed_optimizer,
            asleep=asleep,
        )
        self._writer.begin(snapshot)

    def wait(self) -> None:
        """Until nothing is being written."""
        self._writer.wait()

    def delete_below(self, version: int) -> None:
        """Remove what no later checkpoint needs; on the first rank only."""
        if self._workers.is_first:
            self._folder.delete_below(version)

    def open(self, path: Path, *, version: int, dtype: str) -> StoredCheckpoint:
        """Read a checkpoint's record and check its files: each rank its share.

        Args:
            path: of the checkpoint.
            version: that it has to be of.
            dtype: ``model.dtype``.

        Raises:
            CheckpointError: it is not there, not whole, of another version, or not one that can be gone on with.
        """
        record = read_record(path, version=version, rank=self._workers.rank, num_ranks=self._workers.num_ranks)
        check_dtype(path, record, dtype)
        lost = self._why_lost(record)
        if lost and self._options.optimizer != "fresh":
            raise CheckpointError(
                f"{path}: {lost}, so the state of its optimizer cannot be gone on with; resume as it was, or with "
                "learner.optimizer=fresh: the weights are kept, and the optimizer starts anew"
            )
        if lost and self._workers.is_first:
            _log.warning("%s: %s; the optimizer starts anew", path, lost)
        if path.parent.resolve() == self._own_folder.resolve() and record.backend == "megatron":
            self._folder.reference = record.reference
        self._writer.saved = CheckpointWritten(version=record.version, path=str(path))
        return StoredCheckpoint(path, record, self._roles, is_fresh=bool(lost))

    def _why_lost(self, record: CheckpointRecord) -> str:
        """What keeps the optimizer's state from being gone on with; empty if nothing does."""
        found = record.megatron
        if found is None:
            return f"learner.backend is megatron, and the {record.backend} learner wrote it"
        if found.distributed_optimizer != self._options.megatron.distributed_optimizer:
            return (
                f"it was written with learner.megatron.distributed_optimizer {str(found.distributed_optimizer).lower()}"
            )
        return ""


def has_further_layers(folder: Path) -> bool:
    """Whether a distributed checkpoint has layers that predict further tokens.

    Raises:
        CheckpointError: it is damaged.
    """
    return is_distributed(folder) and any(name.startswith(MTP_BLOCK) for name in DistReader(folder).tensors)


def read_weights(model: ParallelModel, folder: Path, *, rank: int, name: str = POLICY) -> None:
    """Fill a model from a folder, whether its weights lie there as megatron-core's distributed checkpoint or in
    Hugging Face format. A collective.

    Raises:
        CheckpointError: it does not have them, in either format.
    """
    if is_distributed(folder / name):
        if model.architecture.num_mtp_layers and not has_further_layers(folder / name):
            raise CheckpointError(
                f"{folder}: was written without layers that predict further tokens, which learner.megatron.mtp trains; "
                "go on without the key, or begin a run from what `penstock convert` makes of it, which has them as "
                "they were"
            )
        load_model(model, folder / name)
    elif name == POLICY:
        load_weights(model, folder, rank=rank)
    else:
        raise CheckpointError(f"{folder}: was written without a {name}; resume with the objective of the run")
