"""What the ranks of a learner do in tests of checkpoints; jobs for :mod:`rank_cases`, without the learner's worker."""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import resource
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import pytest
import torch
from learner_cases import learner_plan, make_groups
from worker_host import Host

from penstock.backends.learners.checkpoints.channel import CheckpointChannel
from penstock.backends.learners.checkpoints.folder import CheckpointFolder
from penstock.backends.learners.checkpoints.record import STATE_FOLDER, read_record
from penstock.backends.learners.checkpoints.state import load_state
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.parallel import replica, whole
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.snapshot import restore_random_state, take_snapshot
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.torch.worker import TorchWorker
from penstock.messages.errors import UserFault
from penstock.messages.local import BatchTrained, CheckpointWritten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.torch.snapshot import LearnerSnapshot
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.commands import LearnerCommand

VERSION = 2
CRITIC = objective("ppo", kl_coef=0.1)


class Division(NamedTuple):
    """Over what a learner is spread."""

    num_ranks: int
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    shard_size: int | None = None
    tensor_parallel: int = 1

    def options(self) -> LearnerOptions:
        return LearnerOptions(
            learning_rate=1e-2,
            parallel=self.parallel,
            shard_size=self.shard_size,
            tensor_parallel=self.tensor_parallel,
            objective=CRITIC,
        )


DIVISIONS = {
    "1": Division(1),
    "2 fsdp": Division(2),
    "3 fsdp": Division(3),
    "2 ddp": Division(2, "ddp"),
    "2 copies over 2": Division(4, shard_size=2),
}


@dataclass
class Learner:
    """One rank of a learner without its worker."""

    model: PackedModel
    trainer: PolicyTrainer
    reference: PackedModel | None
    workers: WorkerGroup

    def train(self, version: int) -> float:
        step = (version * 0.37) % 1.0
        groups = make_groups(((step, 0.0, 1.0), (0.5, step / 2, 0.0)))
        result = self.trainer.train(groups, version=version, min_token_version=0)
        return {metric.name: metric.value for metric in result.metrics}["train/loss"]

    def snapshot(self, version: int) -> LearnerSnapshot:
        return take_snapshot(
            self.model,
            self.trainer,
            self.reference,
            version=version,
            dtype=str(self.model.dtype).removeprefix("torch."),
            trained_tokens=7,
            canary=(1,),
        )

    def digests(self) -> dict[str, str]:
        """Of every whole tensor, weights and state, as a checkpoint has them."""
        model = {f"model/{name}": whole(t, self.model.dtype) for name, t in self.model.model.named_parameters()}
        return digests_of(model | {name: whole(tensor) for name, tensor in self.trainer.state().items()})


def open_rank(
    workers: WorkerGroup, folder: Path, division: Division, dtype: str, *, reference_folder: Path | None = None
) -> Learner:
    options = division.options()
    model = load_divided(folder, workers, options, dtype=dtype)
    reference = replica(model, workers, options)
    if reference_folder is not None:
        reference = load_divided(reference_folder, workers, options, dtype=dtype)
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=9, reference=reference, check_stop=lambda: None, workers=workers
    )
    return Learner(model, trainer, reference, workers)


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + data).hexdigest()
    return digests


# --- what each rank does --------------------------------------------------------------------------------------------


def train_and_save(
    workers: WorkerGroup, source: Path, folder: Path, division: Division, dtype: str
) -> tuple[dict[str, str], float]:
    """Two batches, a checkpoint, and the loss of one more batch."""
    learner = open_rank(workers, source, division, dtype)
    for version in range(1, VERSION + 1):
        learner.train(version)
    torch.manual_seed(workers.rank)
    checkpoints = CheckpointFolder(folder, epoch=1, tokenizer_source=source, channel=CheckpointChannel(workers))
    digests = learner.digests()
    checkpoints.write(learner.snapshot(VERSION))
    return digests, learner.train(VERSION + 1)


def load_and_train(
    workers: WorkerGroup, path: Path, division: Division, dtype: str
) -> tuple[dict[str, str], float, dict[str, int]]:
    """What was loaded, the loss of one more batch, and the bytes that this rank had to hold of the state."""
    record = read_record(path, version=VERSION, rank=workers.rank, num_ranks=workers.num_ranks)
    assert record.reference is not None
    learner = open_rank(workers, path, division, dtype, reference_folder=path.parent / record.reference.folder)
    tensors = load_state(path / STATE_FOLDER, learner.trainer.layouts())
    sizes = {name: whole_or_part.numel() for name, whole_or_part in ((n, _local(t)) for n, t in tensors.items())}
    learner.trainer.restore(tensors)
    restore_random_state(tensors, workers)
    assert torch.initial_seed() == (workers.rank if workers.rank < len(tensors["random/cpu"]) else 0)
    return learner.digests(), learner.train(VERSION + 1), sizes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast("Any", tensor).to_local() if hasattr(tensor, "to_local") else tensor


def save_where_one_rank_may_not_write(
    workers: WorkerGroup, source: Path, folder: Path, *, refusing: int
) -> tuple[str, str]:
    """What the refused write says, after one that succeeded."""
    learner = open_rank(workers, source, Division(workers.num_ranks), "float32")
    checkpoints = CheckpointFolder(folder, epoch=1, tokenizer_source=source, channel=CheckpointChannel(workers))
    learner.train(1)
    checkpoints.write(learner.snapshot(1))
    learner.train(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if workers.rank == refusing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        with pytest.raises(UserFault) as refused:
            checkpoints.write(learner.snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # The channel is as good as before.
    return str(refused.value), checkpoints.write(learner.snapshot(2)).name


def die_while_writing(workers: WorkerGroup, source: Path, folder: Path) -> None:
    learner = open_rank(workers, source, Division(workers.num_ranks), "float32")
    checkpoints = CheckpointFolder(folder, epoch=1, tokenizer_source=source, channel=CheckpointChannel(workers))
    learner.train(1)
    checkpoints.write(learner.snapshot(1))
    snapshot = learner.snapshot(2)
    if workers.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    checkpoints.write(snapshot)


def carry_out(
    workers: WorkerGroup, source: Path, folder: Path, division: Division, epoch: int, commands: Sequence[LearnerCommand]
) -> tuple[list[float], list[str]]:
    """The losses of what was trained, and the paths of what was saved."""
    options = division.options()
    host = Host()
    plan = learner_plan(source, folder, options, seed=3, num_steps=9, epoch=epoch)
    worker = TorchWorker(plan, workers, host, None)
    losses: list[float] = []
    for command in commands:
        answer = worker.carry_out(command)
        if isinstance(answer, BatchTrained):
            losses.append({metric.name: metric.value for metric in answer.metrics}["train/loss"])
    worker.finish()
    assert not host.errors, host.errors
    return losses, [answer.path for answer in host.answers if isinstance(answer, CheckpointWritten)]
