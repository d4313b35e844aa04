"""What ranks do in the tests of the trainer. Imported by ranks only."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from weight_cases import CPU, gathered, opened

from penstock.backends.learners.gang.gang import Gang
from penstock.backends.learners.megatron.build import build_model, close_groups
from penstock.backends.learners.megatron.load import own_parameters
from penstock.backends.learners.megatron.reference import copy_weights, frozen
from penstock.backends.learners.megatron.trainable import TrainableModel
from penstock.backends.learners.megatron.trainer import MegatronTrainer
from penstock.backends.learners.objectives.validity import is_user_objective, needs_reference
from penstock.backends.learners.options import LearnerOptions
from penstock.messages.samples import Group

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.build import ParallelModel

TIMEOUT_S = 120.0


@functools.cache
def gang_of(rank: int, num_ranks: int) -> Gang:
    control = dist.new_group(backend="gloo") if num_ranks > 1 else None
    return Gang(rank=rank, num_ranks=num_ranks, local_rank=rank, device=CPU, timeout_s=TIMEOUT_S, control=control)


def trained(
    rank: int, folder: str, options: bytes, num_ranks: int, batches: bytes, temperature: float
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The figures of every batch, and on the first rank the weights after the last.

    Args:
        options: the ``learner:`` block, as msgpack.
        batches: groups of each batch, as msgpack.
    """
    learner = msgspec.msgpack.decode(options, type=LearnerOptions)
    keys = msgspec.structs.asdict(learner.megatron)
    model, _ = opened(rank, folder, keys, num_ranks)
    trainer, trainable = made(model, learner, gang_of(rank, num_ranks), temperature)
    figures: list[dict[str, float]] = []
    for number, groups in enumerate(msgspec.msgpack.decode(batches, type=list[tuple[Group, ...]]), start=1):
        result = trainer.train(groups, version=number, min_token_version=0)
        figures.append({metric.name: metric.value for metric in result.metrics})
    trainable.gather_weights()
    weights = {name: tensor.numpy() for bucket in gathered(model, rank) for name, tensor in bucket}
    close_groups()
    return figures, weights


def made(
    model: ParallelModel, options: LearnerOptions, gang: Gang, temperature: float
) -> tuple[MegatronTrainer, TrainableModel]:
    objective = options.objective
    trainable = TrainableModel(
        model, options.megatron, betas=options.betas, weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm, device=CPU, temperature=temperature,
        entropy_gradient=objective.entropy_coef != 0.0 or is_user_objective(objective.name),
    )  # fmt: skip
    reference = None
    if needs_reference(objective):
        reference = frozen(
            build_model(
                model.architecture, model.layout, options.megatron, precision=model.precision, device=CPU
            )
        )
        copy_weights(model, reference)
    trainer = MegatronTrainer(
        trainable, reference, options, temperature=temperature, num_steps=10, check_stop=lambda: None, seed=3, gang=gang
    )
    return trainer, trainable
