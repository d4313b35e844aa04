"""What ranks do in the tests of checkpoints. Imported by ranks only."""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import training_plan as plan
from weight_cases import CPU, gathered

from penstock.backends.learners.checkpoints.record import CheckpointError, LearnerFacts
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.checkpoint import checkpoint_snapshot
from penstock.backends.learners.megatron.checkpoint.checkpoint import POLICY, MegatronCheckpoints, read_weights
from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.model.build import build_model, close_groups, open_groups
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
from penstock.backends.learners.megatron.weights.load import freeze, load_weights
from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.worker_group.workers import WorkerGroup

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.checkpoint.dist_writer import WrittenPart
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores
    from penstock.messages.local import CheckpointWritten

Weights = dict[str, Any]
SAVED_VERSION = 2
LEARNING_RATE = 1e-3


class Learner:
    """One rank of what a learner does between two commands."""

    def __init__(self, rank: int, model_folder: Path, folder: Path, keys: dict[str, Any], num_ranks: int) -> None:
        learner = keys.pop("learner", {})
        self.options = LearnerOptions(**learner, megatron=megatron_options(keys))
        self.workers = workers_of(rank, num_ranks)
        self.written: list[CheckpointWritten] = []
        self.failed: list[BaseException] = []
        self.checkpoints = MegatronCheckpoints(
            folder, epoch=1, model_folder=model_folder, workers=self.workers, options=self.options,
            done=self.written.append, fail=self.failed.append,
        )  # fmt: skip

    def trainable(self, model: ParallelModel) -> TrainableModel:
        freeze(model, self.options, rank=self.workers.rank)
        return TrainableModel(
            model, self.options.megatron, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY,
            max_grad_norm=plan.MAX_GRAD_NORM, device=CPU, temperature=plan.TEMPERATURE,
        )  # fmt: skip

    def step(self, trainable: TrainableModel, step: int) -> None:
        layout = trainable.model.layout
        share = plan.NUM_MICRO_BATCHES // layout.data
        first = share * layout.place(self.workers.rank).data
        batches = plan.micro_batches(step, trainable.model.architecture.vocab_size)
        count = plan.num_trained(batches)

        def loss(_: int, scores: VocabularyScores) -> torch.Tensor:
            return -(scores.logprobs.sum() + plan.ENTROPY_COEF * scores.entropy.sum()) / count

        trainable.step(batches[first : first + share], loss, learning_rate=LEARNING_RATE)


def saved(
    rank: int, model_folder: str, folder: str, keys: dict[str, Any], num_ranks: int, reference: bool = False
) -> tuple[str, Weights, Weights]:
    """Train two steps, save, and train a third one while it is written: the path, and on the first rank the weights
    as they were saved and after the third step. With a reference, a checkpoint of version 1 before that."""
    learner = Learner(rank, Path(model_folder), Path(folder), keys, num_ranks)
    open_groups(layout_of(learner.options.megatron, num_ranks), seed=1)
    model = model_of(rank, model_folder, megatron_keys(keys), num_ranks)
    trainable = learner.trainable(model)
    other = model_of(rank, model_folder, megatron_keys(keys), num_ranks) if reference else None
    for step in range(SAVED_VERSION):
        if other is not None:
            facts = LearnerFacts(step, "float32", 0, ())
            learner.checkpoints.begin_save({POLICY: trainable}, facts, reference=other)
        learner.step(trainable, step)
    facts = LearnerFacts(SAVED_VERSION, "float32", 123, (3, 1, 4))
    learner.checkpoints.begin_save({POLICY: trainable}, facts, reference=other, tensors={"mine": torch.arange(3.0)})
    weights = weights_of(model, rank)
    learner.step(trainable, SAVED_VERSION)
    trainable.gather_weights()
    after = weights_of(model, rank)
    learner.checkpoints.wait()
    assert not learner.failed, learner.failed
    close_groups()
    learner.checkpoints.delete_below(1)
    assert learner.checkpoints.saved == learner.written[-1]
    return learner.written[-1].path, weights, after


def gone_on(
    rank: int, model_folder: str, path: str, keys: dict[str, Any], num_ranks: int, reference: bool = False
) -> tuple[Weights, Weights, Any]:
    """Load what was saved, and train the third step: on the first rank the weights before and after."""
    learner = Learner(rank, Path(model_folder), Path(path).parent, keys, num_ranks)
    stored = learner.checkpoints.open(Path(path), version=SAVED_VERSION, dtype="float32")
    open_groups(layout_of(learner.options.megatron, num_ranks), seed=1)
    model = bare_model(model_folder, learner.options.megatron, num_ranks)
    stored.load_weights(model)
    other = None
    if reference:
        built = bare_model(model_folder, learner.options.megatron, num_ranks)
        stored.load_reference(built)
        other = weights_of(built, rank)
    weights = weights_of(model, rank)
    trainable = learner.trainable(model)
    stored.load_optimizer(trainable)
    stored.restore_random_state()
    assert stored.is_fresh or torch.equal(stored.tensors()["mine"], torch.arange(3.0))
    learner.step(trainable, SAVED_VERSION)
    trainable.gather_weights()
    after = weights_of(model, rank)
    close_groups()
    return weights, after, other


def loaded_by_megatron(rank: int, model_folder: str, path: str, keys: dict[str, Any], num_ranks: int) -> Weights:
    """The weights as megatron-core's own entrypoint reads them, with its own strategies."""
    from megatron.core import dist_checkpointing

    from penstock.backends.learners.megatron.checkpoint.sharded import model_state

    options = megatron_options(keys)
    open_groups(layout_of(options, num_ranks), seed=1)
    model = bare_model(model_folder, options, num_ranks)
    loaded = dist_checkpointing.load(model_state(model), f"{path}/{POLICY}")
    model.chunks[0].load_state_dict(loaded["model"])
    weights = weights_of(model, rank)
    close_groups()
    return weights


def killed_while_saving(rank: int, model_folder: str, folder: str, keys: dict[str, Any], num_ranks: int) -> None:
    """Save version 0, train, and begin to save version 1; the last rank is killed when half of its parts are there."""
    learner = Learner(rank, Path(model_folder), Path(folder), keys, num_ranks)
    open_groups(layout_of(learner.options.megatron, num_ranks), seed=1)
    model = model_of(rank, model_folder, megatron_keys(keys), num_ranks)
    trainable = learner.trainable(model)
    learner.checkpoints.begin_save({POLICY: trainable}, LearnerFacts(0, "float32", 0, ()), reference=None)
    learner.step(trainable, 0)
    learner.checkpoints.wait()
    if rank == num_ranks - 1:
        die_at_half()
    learner.checkpoints.begin_save({POLICY: trainable}, LearnerFacts(1, "float32", 0, ()), reference=None)
    learner.checkpoints.wait()
    assert len(learner.written) == 1
    raise learner.failed[0]


def die_at_half() -> None:
    module: Any = checkpoint_snapshot
    write = module.write_parts

    def die() -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def write_half(folder: Path, parts: list[WrittenPart], common: dict[str, Any], channel: object) -> None:
        half = len(parts) // 2
        write(folder, [*parts[:half], parts[half]._replace(read=die), *parts[half + 1 :]], common, channel)

    module.write_parts = write_half


def refusal(rank: int, model_folder: str, path: str, version: int, keys: dict[str, Any], num_ranks: int) -> str:
    """Why a checkpoint is not opened; empty if it is."""
    learner = Learner(rank, Path(model_folder), Path(path).parent, keys, num_ranks)
    try:
        learner.checkpoints.open(Path(path), version=version, dtype="float32")
    except CheckpointError as error:
        return str(error)
    return ""


def weights_in(rank: int, model_folder: str, path: str, keys: dict[str, Any], num_ranks: int) -> Weights:
    """What a learner begins with whose ``model.path`` this is."""
    options = megatron_options(keys)
    open_groups(layout_of(options, num_ranks), seed=1)
    model = bare_model(model_folder, options, num_ranks)
    read_weights(model, Path(path), rank=rank)
    weights = weights_of(model, rank)
    close_groups()
    return weights


def megatron_keys(keys: dict[str, Any]) -> dict[str, Any]:
    return {**keys, "optimizer": {**keys.get("optimizer", {}), "adam_eps": plan.EPSILON}}


def megatron_options(keys: dict[str, Any]) -> MegatronOptions:
    return MegatronOptions(**megatron_keys(keys))


def workers_of(rank: int, num_ranks: int) -> WorkerGroup:
    control = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    return WorkerGroup(rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=60.0, control=control)


def bare_model(model_folder: str, options: MegatronOptions, num_ranks: int) -> ParallelModel:
    architecture = read_architecture(Path(model_folder))
    precision = options.precision or "float32"
    return build_model(architecture, layout_of(options, num_ranks), options, precision=precision, device=CPU)


def model_of(rank: int, model_folder: str, keys: dict[str, Any], num_ranks: int) -> ParallelModel:
    model = bare_model(model_folder, MegatronOptions(**keys), num_ranks)
    load_weights(model, Path(model_folder), rank=rank)
    return model


def weights_of(model: ParallelModel, rank: int) -> Weights:
    return {name: tensor.float().numpy().copy() for bucket in gathered(model, rank) for name, tensor in bucket}
