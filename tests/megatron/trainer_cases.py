"""What ranks do in the tests of the trainer. Imported by ranks only."""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import trainer_plan as plan
import training_plan
from weight_cases import CPU, gathered, opened

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.megatron.critic import open_critic
from penstock.backends.learners.megatron.model.build import ParallelModel, build_model, close_groups
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
from penstock.backends.learners.megatron.reference import copy_weights, frozen
from penstock.backends.learners.megatron.trainer import MegatronTrainer
from penstock.backends.learners.megatron.weights.load import freeze
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.worker_group.workers import WorkerGroup
from penstock.messages.errors import DivergedError
from penstock.messages.samples import Group

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores

TIMEOUT_S = 120.0


@functools.cache
def workers_of(rank: int, num_ranks: int) -> WorkerGroup:
    """Of the processes of the tests."""
    control: Any = dist.new_group(backend="gloo") if num_ranks > 1 else None
    return WorkerGroup(rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=TIMEOUT_S, control=control)


def trained(
    rank: int, folder: str, options: bytes, num_ranks: int, batches: bytes, run_folder: str = ""
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The figures of every batch, and on the first rank the weights after the last.

    Args:
        options: the ``learner:`` block, as msgpack.
        batches: groups of each batch, as msgpack.
        run_folder: for dumps of steps.
    """
    learner = msgspec.msgpack.decode(options, type=LearnerOptions)
    model, trainable, trainer = made(
        rank, folder, learner, num_ranks, run_folder=Path(run_folder) if run_folder else None
    )
    figures: list[dict[str, float]] = []
    for number, groups in enumerate(msgspec.msgpack.decode(batches, type=list[tuple[Group, ...]]), start=1):
        result = trainer.train(groups, version=number, min_token_version=0)
        figures.append({metric.name: metric.value for metric in result.metrics})
    trainable.gather_weights()
    weights = named_weights(model, rank)
    close_groups()
    return figures, weights


def gradient(
    rank: int, folder: str, options: bytes, num_ranks: int, groups: bytes
) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures of a batch as one step, and on the first rank its gradient, by the names of a checkpoint."""
    learner = msgspec.msgpack.decode(options, type=LearnerOptions)
    assert not learner.megatron.distributed_optimizer, "every rank has its whole gradient then"
    model, _, trainer = made(rank, folder, learner, num_ranks)
    batch = read_groups(msgspec.msgpack.decode(groups, type=tuple[Group, ...]), min_token_version=0)
    figures = trainer.accumulate(batch, version=1)
    with torch.no_grad():  # what is gathered is the weights
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                found: Any = parameter
                parameter.copy_(found.main_grad)
    found_gradient = named_weights(model, rank)
    close_groups()
    return figures, found_gradient


def short_of_memory(
    rank: int, folder: str, options: bytes, num_ranks: int, batches: bytes, limit: plan.Limit
) -> tuple[list[dict[str, float]], dict[str, Any], int, str]:
    """As :func:`trained`, where memory ends in the second layer; the size of micro-batches in the end, and the error
    that ended the learner."""
    learner = msgspec.msgpack.decode(options, type=LearnerOptions)
    kept = Path(limit.folder)
    model, trainable, trainer = made(rank, folder, learner, num_ranks, kept=kept)

    def run_out(values: torch.Tensor) -> None:
        if values.shape[0] > limit.max_inputs:
            raise torch.OutOfMemoryError(f"{values.shape[0]} inputs")

    def forward(_module: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        hidden = output[0]
        if limit.place == "forward":
            run_out(hidden)
        elif hidden.requires_grad:
            hidden.register_hook(run_out)  # type: ignore[no-untyped-call]

    if rank in limit.ranks:
        model.chunks[0].decoder.layers[1].register_forward_hook(forward)
    figures: list[dict[str, float]] = []
    story = ""
    try:
        for number, groups in enumerate(msgspec.msgpack.decode(batches, type=list[tuple[Group, ...]]), start=1):
            result = trainer.train(groups, version=number, min_token_version=0)
            figures.append({metric.name: metric.value for metric in result.metrics})
    except MemoryError as error:
        story = str(error)
    weights = {}
    if not story:
        trainable.gather_weights()
        weights = named_weights(model, rank)
    size = trainer.max_tokens_per_micro_batch
    close_groups()
    return figures, weights, size, story


def after_a_bad_step(rank: int, folder: str, keys: dict[str, Any], num_ranks: int) -> tuple[str, bool, bool]:
    """The error of a step whose gradient is no number; whether the weights are as they were; and whether the next step
    goes where it would have gone without."""
    ends: list[dict[str, Any]] = []
    story, is_unchanged = "", False
    for has_bad_step in (True, False):
        model, trainable, _ = made(rank, folder, plan.learner_options(megatron=keys), num_ranks)
        share = training_plan.NUM_MICRO_BATCHES // model.layout.data
        first = share * model.layout.place(rank).data
        own = training_plan.micro_batches(0, plan.VOCAB)[first : first + share]
        if has_bad_step:
            before = named_weights(model, rank)
            try:
                trainable.step(own, lambda _, scores: scores.logprobs.sum() * math.nan, learning_rate=1e-3)
            except DivergedError as error:
                story = str(error)
            trainable.gather_weights()
            after = named_weights(model, rank)
            is_unchanged = all(np.array_equal(after[name], before[name]) for name in before)

        def loss(_: int, scores: VocabularyScores) -> torch.Tensor:
            return -scores.logprobs.mean()

        trainable.step(own, loss, learning_rate=1e-3)
        trainable.gather_weights()
        ends.append(named_weights(model, rank))
        close_groups()
    return story, is_unchanged, all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[1])


def named_weights(model: ParallelModel, rank: int) -> dict[str, Any]:
    """On the first rank, by the names of a checkpoint."""
    return {name: tensor.numpy() for bucket in gathered(model, rank) for name, tensor in bucket}


def made(
    rank: int,
    folder: str,
    options: LearnerOptions,
    num_ranks: int,
    *,
    run_folder: Path | None = None,
    kept: Path | None = None,
) -> tuple[ParallelModel, TrainableModel, MegatronTrainer]:
    """A policy with its optimizer, and its trainer."""
    objective = options.objective
    model, _ = opened(
        rank,
        folder,
        msgspec.structs.asdict(options.megatron),
        num_ranks,
        precision=options.megatron.precision or "float32",
    )
    freeze(model, options, rank=rank)
    trainable = TrainableModel(
        model, options.megatron, betas=options.betas, weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm, device=CPU, temperature=plan.TEMPERATURE,
        entropy_gradient=objective.entropy_coef != 0.0 or loss_of(objective).is_function,
    )  # fmt: skip
    reference = None
    if needs_reference(objective):
        built = build_model(
            model.architecture, model.layout, options.megatron, precision=model.precision, device=CPU
        )  # fmt: skip
        reference = frozen(built)
        copy_weights(model, reference)
    trainer = MegatronTrainer(
        trainable, reference, options, temperature=plan.TEMPERATURE, num_steps=plan.NUM_STEPS,
        check_stop=lambda: None, seed=plan.SEED, workers=workers_of(rank, num_ranks),
        critic=open_critic(trainable, options, num_steps=plan.NUM_STEPS, workers=workers_of(rank, num_ranks)),
        run_folder=run_folder,
        folder=kept,
    )  # fmt: skip
    return model, trainable, trainer
