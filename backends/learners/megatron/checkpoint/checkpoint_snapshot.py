"""The state of the Megatron learner at one version, copied to memory of its own, so that training can go on while it is
written; see :class:`~penstock.backends.learners.checkpoints.folder.Snapshot`.

A checkpoint has a folder for each model that is trained (``policy/``, and ``critic/`` where that is a model of its
own), each a distributed checkpoint of megatron-core with the weights and what the optimizer keeps; the config and the
tokenizer; and ``trainer_state/`` with the rest, tensors that are small and the same on every rank.

Invariants:

* Nothing of a snapshot changes any more, and everything in it is of one version.
* What data-parallel ranks have in common is copied and written by the first of them.
* Where policy and critic lie on different ranks, the ranks of each write its folder among themselves, and those of the
  policy the rest: the files are those of any other layout.
"""

# torch.random is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from penstock.backends.checkpoint.config_file import write_config
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, MegatronRecord
from penstock.backends.learners.checkpoints.shards import shard_of
from penstock.backends.learners.checkpoints.state import files_of_rank as state_files_of_rank
from penstock.backends.learners.checkpoints.state import save_state
from penstock.backends.learners.megatron.checkpoint.dist_writer import WrittenPart, files_of_rank, write_parts
from penstock.backends.learners.megatron.checkpoint.sharded import (
    CONTENT,
    OPTIMIZER,
    model_state,
    num_steps,
    optimizer_state,
    parts_of,
)
from penstock.backends.learners.torch.snapshot import random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.checkpoints.channel import CheckpointChannel
    from penstock.backends.learners.checkpoints.record import LearnerFacts
    from penstock.backends.learners.checkpoints.shards import Shard
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.offload import SleepingMemory
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.training.roles import Roles

POLICY: Final = "policy"
OWN_TENSOR: Final = "own/"
"""Before the names of the caller's own tensors, so that they do not get mixed up with the rest."""


class CopiedModel(NamedTuple):
    """What this rank writes of one model."""

    parts: list[WrittenPart]
    common: dict[str, Any]
    """What is no tensor, for those who read it with megatron-core."""
    num_steps: int
    """Steps that its optimizer has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSnapshot:
    """What one rank writes a checkpoint from."""

    facts: LearnerFacts
    models: Mapping[str, CopiedModel]
    """Those that this rank has a part of."""
    rest: Mapping[str, Shard]
    """Random state, and tensors of the caller; empty where the critic lies alone."""
    has_policy: bool
    own_channel: CheckpointChannel
    """To the ranks that hold what this one holds."""
    reference: CopiedModel | None
    """None where it lies on disk already, and where other ranks have it."""
    model_folder: Path
    megatron: MegatronRecord

    @property
    def size_bytes(self) -> int:
        copied = [*self.models.values(), *([self.reference] if self.reference else [])]
        parts = sum(part.read().nbytes for model in copied for part in model.parts)
        return parts + sum(shard.local.nbytes for shard in self.rest.values())

    def write(self, folder: Path, channel: CheckpointChannel, reference: str) -> Sequence[Path]:
        """See :class:`.Snapshot`."""
        return channel.each(lambda: self._write_own(folder))[channel.rank]

    def _write_own(self, folder: Path) -> list[Path]:
        channel = self.own_channel
        files: list[Path] = []
        if self.has_policy:
            state = folder / STATE_FOLDER
            channel.each(lambda: save_state(state, self.rest, channel))
            files = state_files_of_rank(state, channel.rank)
            channel.first(lambda: write_config(self.model_folder, folder, self.facts.dtype))
        for name, model in self.models.items():
            files += self._write_model(folder / name, model)
        return files

    def write_reference(self, folder: Path, channel: CheckpointChannel) -> None:
        """See :class:`.Snapshot`."""
        channel.each(lambda: self._write_own_reference(folder))

    def _write_own_reference(self, folder: Path) -> None:
        if self.has_policy:
            assert self.reference is not None, "a reference that is not on disk has been copied"
            self._write_model(folder / POLICY, self.reference)
            self.own_channel.first(lambda: write_config(self.model_folder, folder, self.facts.dtype))

    def _write_model(self, folder: Path, model: CopiedModel) -> list[Path]:
        channel = self.own_channel
        channel.first(folder.mkdir)
        channel.each(lambda: write_parts(folder, model.parts, model.common, channel))
        return files_of_rank(folder, channel.rank)


def take_snapshot(
    trainables: Mapping[str, TrainableModel],
    facts: LearnerFacts,
    *,
    reference: ParallelModel | None,
    keeps_reference: bool,
    tensors: Mapping[str, Tensor],
    model_folder: Path,
    roles: Roles,
    own_channel: CheckpointChannel,
    distributed_optimizer: bool,
    asleep: SleepingMemory | None = None,
) -> MegatronSnapshot:
    """Copy what the next step would change. A collective.

    Args:
        trainables: that this rank has, by name.
        facts: the rest.
        reference: if there is one here.
        keeps_reference: whether it has to be written.
        tensors: small ones, the same on every rank.
        model_folder: whose config the checkpoint gets.
        roles: which ranks hold what.
        own_channel: to those that hold what this one holds.
        distributed_optimizer: whether its state is divided over data-parallel ranks.
        asleep: what has their memory while the learner sleeps.
    """
    own = {f"{OWN_TENSOR}{name}": shard_of(tensor.to("cpu", copy=True)) for name, tensor in tensors.items()}
    models = {
        name: _copied_trainable(trainable, is_gathered=distributed_optimizer, asleep=asleep)
        for name, trainable in trainables.items()
    }
    steps = roles.all_figures({name: float(model.num_steps) for name, model in models.items()})
    return MegatronSnapshot(
        facts=facts,
        models=models,
        rest=_random_state(roles) | own,
        has_policy=roles.has_policy,
        own_channel=own_channel,
        reference=None if reference is None or not keeps_reference else copied_model(reference, asleep),
        model_folder=model_folder,
        megatron=MegatronRecord(
            layout=str(next(iter(trainables.values())).model.layout),
            distributed_optimizer=distributed_optimizer,
            optimizer_steps={name: int(count) for name, count in steps.items()},
        ),
    )


def _random_state(roles: Roles) -> dict[str, Shard]:
    """A row for each rank; from where they lie apart all rows come to those of the policy, which write."""
    own = random_state(roles.everyone)
    if not roles.are_apart:
        return own
    whole: dict[str, Shard] = {}
    for name, shard in own.items():
        table = torch.zeros(shard.shape, dtype=shard.local.dtype, device=roles.everyone.device)
        table[roles.everyone.rank] = shard.local[0].to(table.device)
        whole[name] = shard_of(roles.everyone.sum_(table).cpu())
    return whole if roles.has_policy else {}


def copied_model(model: ParallelModel, asleep: SleepingMemory | None = None) -> CopiedModel:
    """A model without an optimizer."""
    parts, common = parts_of(model_state(model), is_copied=True, on_host=_values(asleep))
    return CopiedModel(parts, common | {"content_metadata": dict(CONTENT)}, 0)


def _copied_trainable(trainable: TrainableModel, *, is_gathered: bool, asleep: SleepingMemory | None) -> CopiedModel:
    if asleep is None:  # else they were gathered before they slept
        trainable.gather_weights()
    weights = copied_model(trainable.model, asleep)
    with contextlib.nullcontext() if asleep is None else asleep.optimizer_on_host():
        state = {OPTIMIZER: optimizer_state(trainable, is_loading=False)}
        # A distributed optimizer's has just been gathered, into memory that nobody else has.
        parts, common = parts_of(state, is_copied=not is_gathered, on_host=_values(asleep))
        common = copy.deepcopy(common)  # the optimizer's own number of steps is in it
    return CopiedModel([*weights.parts, *parts], weights.common | common, num_steps(common))


def _values(asleep: SleepingMemory | None) -> Callable[[Tensor], Tensor] | None:
    return None if asleep is None else asleep.on_host
