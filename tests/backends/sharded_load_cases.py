"""What ranks do in the tests of loading in shares; jobs for :mod:`rank_cases`."""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import pytest
import torch
from learner_cases import Heard, make_groups

from penstock.backends.checkpoint.tensors import CheckpointTensors, TensorSlice
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.checkpoints.shards import local_of
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions, LoraOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import parallelize, replica, whole
from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.learners.torch.reference import frozen
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.worker_group.workers import WorkerGroup


class Loaded(NamedTuple):
    """By one rank, in shares, and from the whole model that was divided then."""

    shares: dict[str, Tensor]
    expected: dict[str, Tensor]
    num_read: int
    """Elements that were read of the folder for the shares."""
    warnings: list[str]


def load_both(workers: WorkerGroup, folder: Path, dtype: str, *, with_adapters: bool = False) -> Loaded:
    """Every weight and buffer of this rank."""
    options = LearnerOptions(parallel="fsdp")
    lora = LoraOptions(rank=3) if with_adapters else None
    heard = Heard()
    logger = logging.getLogger("penstock.backends.learners.torch.sharded_load")
    logger.addHandler(heard)
    torch.manual_seed(3)
    with _counted_reads() as sizes:
        model = load_divided(folder, workers, options, dtype=dtype, lora=lora)
    logger.removeHandler(heard)
    torch.manual_seed(3)
    divided = PackedModel.load(folder, dtype=dtype, device=torch.device("cpu"))
    if lora is not None:
        divided.adapt(lora)
    parallelize(divided, workers, options)
    assert model.dtype == divided.dtype
    assert model.model.training == divided.model.training
    return Loaded(_state(model), _state(divided), sum(sizes), heard.lines)


@contextmanager
def _counted_reads() -> Generator[list[int]]:
    """Elements of each read."""
    sizes: list[int] = []
    opened, read_whole = CheckpointTensors.slice, CheckpointTensors.__getitem__

    class Counted:
        def __init__(self, inner: TensorSlice) -> None:
            self._inner = inner

        def __getitem__(self, rows: slice) -> Tensor:
            found = self._inner[rows]
            sizes.append(found.numel())
            return found

    def counted(tensors: CheckpointTensors, name: str) -> Counted:
        return Counted(opened(tensors, name))

    def whole(tensors: CheckpointTensors, name: str) -> Tensor:
        found = read_whole(tensors, name)
        sizes.append(found.numel())
        return found

    with patch.object(CheckpointTensors, "slice", counted), patch.object(CheckpointTensors, "__getitem__", whole):
        yield sizes


class Step(NamedTuple):
    """What came of the first batch."""

    figures: dict[str, float]
    gradient: Tensor


def first_step(
    workers: WorkerGroup, folder: Path, shard_size: int | None = None, tensor_parallel: int = 1, critic: str = "own"
) -> Step:
    """Of a model that was loaded in shares, with a reference and a critic."""
    options = LearnerOptions(
        parallel="fsdp",
        shard_size=shard_size,
        tensor_parallel=tensor_parallel,
        objective=objective(name="ppo", kl_coef=0.1, critic=critic),
        max_tokens_per_micro_batch=16,
    )
    model = load_divided(folder, workers, options, dtype="float32")
    reference = frozen(replica(model, workers, options))
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=4, reference=reference, check_stop=lambda: None, workers=workers
    )
    figures = trainer.accumulate(read_groups(make_groups(), min_token_version=0), version=1)
    gradients = [whole(weight.grad).reshape(-1) for weight in trainer.trained_weights() if weight.grad is not None]
    return Step(figures, torch.cat(gradients))


class Trained(NamedTuple):
    """What came of some batches."""

    metrics: list[dict[str, float]]
    published: dict[str, Tensor]
    """On the first rank, by names in a checkpoint."""


def train_and_publish(workers: WorkerGroup, folder: Path, tensor_parallel: int, objective_name: str) -> Trained:
    """Two batches in several micro-batches, whose gradients are clipped."""
    options = LearnerOptions(
        learning_rate=1e-3,
        max_grad_norm=0.05,
        max_tokens_per_micro_batch=16,
        tensor_parallel=tensor_parallel,
        activation_checkpointing=tensor_parallel > 1,  # which changes nothing
        objective=objective(name=objective_name, critic="shared" if objective_name == "ppo" else "none"),
    )
    model = load_divided(folder, workers, options, dtype="float32")
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=4, reference=None, check_stop=lambda: None, workers=workers
    )
    metrics: list[dict[str, float]] = []
    for version in (1, 2):
        result = trainer.train(make_groups(), version=version, min_token_version=0)
        metrics.append({one.name: one.value for one in result.metrics})
    published = dict(GatheredWeights(model, workers, max_bucket_bytes=1000).tensors())
    return Trained(metrics, {name: tensor.detach().clone() for name, tensor in published.items()})


def refusal(workers: WorkerGroup, folder: Path, tensor_parallel: int) -> str:
    """What is said when such a model is to be divided so."""
    options = LearnerOptions(tensor_parallel=tensor_parallel)
    with pytest.raises(UserFault) as refused:
        load_divided(folder, workers, options, dtype="float32")
    return str(refused.value)


def _state(model: PackedModel) -> dict[str, Tensor]:
    tensors = (*model.model.named_parameters(remove_duplicate=False), *model.model.named_buffers())
    return {name: local_of(tensor.detach()).clone() for name, tensor in tensors}
