"""Checkpoints of a run that Megatron trains, as one rank of one incarnation of its learner writes and reads them.

Invariants:

* What is saved is copied between two steps; it is written while training goes on, one checkpoint at a time, and
  answered when it is durable.

| wait | who ends it |
|---|---|
| ``begin_save`` and ``wait``, for the checkpoint before | the thread that writes it |
| in ``begin_save``, for the other ranks | they save the same version; at the latest the timeout of the process group |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.checkpoints.record import CheckpointRecord
    from penstock.backends.learners.gang.gang import Gang
    from penstock.backends.learners.megatron.build import ParallelModel
    from penstock.backends.learners.megatron.trainable import TrainableModel
    from penstock.backends.protocol import Fail
    from penstock.messages.local import CheckpointWritten

POLICY = "policy"


class LearnerFacts(NamedTuple):
    """What a checkpoint says beside its tensors."""

    version: int
    dtype: str
    trained_tokens: int
    canary: tuple[int, ...]
    reference_version: int = 0
    """Which policy the reference is."""


class StoredCheckpoint:
    """A checkpoint that has been checked against its record, to be read by every rank in the same order."""

    record: CheckpointRecord
    is_fresh: bool
    """Whether its optimizer's state is left behind, as ``learner.optimizer: fresh`` allows."""

    def load_weights(self, model: ParallelModel, name: str = POLICY) -> None:
        """Before the :class:`.TrainableModel` is made, which copies them."""
        raise NotImplementedError

    def load_reference(self, model: ParallelModel) -> None:
        raise NotImplementedError

    def load_optimizer(self, trainable: TrainableModel, name: str = POLICY) -> None:
        """Does nothing where it ``is_fresh``."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """What ``begin_save`` was given as such, on the host."""
        raise NotImplementedError

    def restore_random_state(self) -> None:
        raise NotImplementedError


class MegatronCheckpoints:
    """Of each rank one thread calls it."""

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int,
        model_folder: Path,
        gang: Gang,
        optimizer: str,
        done: Callable[[CheckpointWritten], None],
        fail: Fail,
    ) -> None:
        """A collective.

        Args:
            folder: of all checkpoints of the run.
            epoch: of this incarnation.
            model_folder: whose config and tokenizer every checkpoint gets.
            gang: all ranks.
            optimizer: ``learner.optimizer``.
            done: called on a thread of its own when a checkpoint is durable.
            fail: called there when it cannot be written.
        """
        raise NotImplementedError

    @property
    def saved(self) -> CheckpointWritten:
        """The newest that lies on disk whole."""
        raise NotImplementedError

    def begin_save(
        self,
        trainables: Mapping[str, TrainableModel],
        facts: LearnerFacts,
        *,
        reference: ParallelModel | None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy everything, and write it in the background. Waits for the checkpoint before. A collective.

        Args:
            trainables: by name: the policy as ``policy``, a critic of its own as ``critic``. They are awake.
            facts: the rest.
            reference: is copied where it does not lie on disk yet.
            tensors: small ones, the same on every rank, that belong to no model.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Until nothing is being written."""
        raise NotImplementedError

    def delete_below(self, version: int) -> None:
        """On the first rank."""
        raise NotImplementedError

    def open(self, path: Path, *, version: int) -> StoredCheckpoint:
        """Read a checkpoint's record and check its files. A collective.

        Raises:
            CheckpointError: it is not there, not whole, of another version, or not one that this learner can go on
                from.
        """
        raise NotImplementedError
