"""The learner's state at one version, copied to memory of its own, so that training can go on while it is written.

Invariants:

* A snapshot is one atomic point: weights, optimizer and random state are copied between two steps.
* Nothing of it changes any more. The reference alone is not copied: it waits for the snapshot before it changes.
* Each rank copies its own parts; all ranks copy at the same point between the same steps.
* The learning rate is a function of the version, and the order in which a batch is gone through one of seed and
  version, so version, weights, optimizers and random state are all that the next step depends on.
"""

# torch's random state is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.checkpoints.record import STATE_FOLDER, LearnerFacts
from penstock.backends.learners.checkpoints.shards import Shard, copied_shard, is_divided, shard_of
from penstock.backends.learners.checkpoints.state import files_of_rank, save_state
from penstock.backends.learners.torch.checkpoint_model import write_adapters, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.device_memory import ParkedMemory
    from penstock.backends.learners.checkpoints.channel import CheckpointChannel
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.torch.trainer import PolicyTrainer
    from penstock.backends.learners.worker_group.workers import WorkerGroup

CPU_RANDOM: Final = "random/cpu"
CUDA_RANDOM: Final = "random/cuda"
"""Of the learner's own devices; as the other one, a row of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSnapshot:
    """What one rank writes a checkpoint from; a folder that transformers loads, with the trainer's state in it. See
    :class:`.Snapshot`."""

    facts: LearnerFacts
    model: PackedModel
    """For its class, config and names only; its weights train on."""
    weights: Mapping[str, Shard]
    """By their names in memory, each tensor under one name; none where the critic lies alone."""
    trainer: Mapping[str, Shard]
    """Optimizer, critic and random state."""
    reference: PackedModel | None
    """The reference model, for its class, config and names only; None without one, and where other ranks have it."""
    reference_weights: Mapping[str, Shard]
    """Empty where the reference lies on disk already."""
    megatron: None = None

    @property
    def size_bytes(self) -> int:
        """Of the tensors in this snapshot."""
        return sum(shard.local.nbytes for shard in (*self.weights.values(), *self.trainer.values()))

    def write(self, folder: Path, channel: CheckpointChannel, reference: str) -> Sequence[Path]:
        """See :class:`.Snapshot`."""
        state = folder / STATE_FOLDER
        channel.each(lambda: save_state(state, self.trainer, channel))
        channel.each(lambda: write_model(folder, self.model, self.weights, channel))
        channel.each(lambda: write_adapters(folder, self.model, self.trainer, channel, base=reference))
        return files_of_rank(state, channel.rank)

    def write_reference(self, folder: Path, channel: CheckpointChannel) -> None:
        """See :class:`.Snapshot`."""
        reference = self.reference or self.model  # of which a rank without has no weights to write
        channel.each(lambda: write_model(folder, reference, self.reference_weights, channel))


def take_snapshot(
    model: PackedModel,
    trainer: PolicyTrainer,
    reference: PackedModel | None,
    *,
    version: int,
    dtype: str,
    trained_tokens: int,
    canary: tuple[int, ...],
    reference_version: int | None = 0,
    keeps_reference: bool = True,
    parked: ParkedMemory | None = None,
) -> LearnerSnapshot:
    """Copy what the next step would change to memory of its own on the host; what is ``parked`` is there already. Of a
    model that is divided nothing may be asked while it runs, so the writer gets all that it needs of it.

    Args:
        model: the policy.
        trainer: of the policy, of its critic, or of both.
        reference: None without one, and where other ranks have it.
        version: of the policy.
        dtype: that it computes in.
        trained_tokens: so far.
        canary: see :mod:`~penstock.backends.learners.training.canary`.
        reference_version: which policy the reference is, on this rank or on others; None where there is none.
        keeps_reference: whether the reference is to be written.
        parked: where the values of a sleeping learner are.
    """
    weights = _kept(model, parked) if trainer.roles.has_policy else ()
    return LearnerSnapshot(
        facts=LearnerFacts(version, dtype, trained_tokens, canary, reference_version),
        model=model,
        weights={name: copied_shard(tensor, parked, model.dtype) for name, tensor in weights},
        trainer={name: copied_shard(tensor, parked) for name, tensor in trainer.state().items()}
        | random_state(trainer.roles.everyone),
        reference=reference,
        reference_weights=_fixed_shards(reference, parked) if reference is not None and keeps_reference else {},
    )


def _fixed_shards(model: PackedModel, parked: ParkedMemory | None) -> dict[str, Shard]:
    """What a checkpoint keeps of a model that nobody changes. Parts of a model that is divided are copied, because they
    are rounded to what it computes in; others are not."""
    return {
        name: copied_shard(tensor, parked, model.dtype) if is_divided(tensor) else shard_of(_found(tensor, parked))
        for name, tensor in _kept(model, parked)
    }


def _found(tensor: Tensor, parked: ParkedMemory | None) -> Tensor:
    return tensor if parked is None else parked.on_host(tensor)


def restore_random_state(tensors: Mapping[str, Tensor], workers: WorkerGroup) -> None:
    """Go on with the random numbers of a snapshot, each rank with those of its number; a rank that there was not yet,
    with those of the first. Those of a GPU only where both had one."""
    torch.set_rng_state(_row(tensors[CPU_RANDOM], workers.rank))
    if workers.device.type == "cuda" and CUDA_RANDOM in tensors:
        torch.cuda.set_rng_state(_row(tensors[CUDA_RANDOM], workers.rank), workers.device)


def _row(states: Tensor, rank: int) -> Tensor:
    return states[rank if rank < len(states) else 0].clone()


def random_state(workers: WorkerGroup) -> dict[str, Shard]:
    """A row for each rank."""
    states = {CPU_RANDOM: torch.get_rng_state()}
    if workers.device.type == "cuda":
        states[CUDA_RANDOM] = torch.cuda.get_rng_state(workers.device)
    return {
        name: Shard(state[None], (workers.num_ranks, len(state)), (workers.rank, 0)) for name, state in states.items()
    }


def _kept(model: PackedModel, parked: ParkedMemory | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a checkpoint keeps; a tensor that has several names comes under the first. Adding
    adapters to them needs their values here, so only then they are not in the memory by which ``parked`` knows them."""
    return model.weights(None if parked is None or model.adapters is None else parked.on_host)
