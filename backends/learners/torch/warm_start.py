"""Supervised steps before version 0, on the same packing and the same optimizer as the steps after it.

Invariants:

* Which demonstrations a step sees is a function of the seed (:mod:`.warm_batches`).
* The loss is the mean of ``−log-prob`` over all response tokens of the batch, at temperature 1.
* Its optimizer and loss scale end with it: reinforcement starts with fresh ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.batch.warm_batches import warm_steps
from penstock.backends.learners.torch.optimizer import MasterAdamW
from penstock.backends.learners.torch.parallel import copies_group, data_workers, tensor_group
from penstock.backends.learners.torch.rounds import laid_out
from penstock.backends.learners.training.loss_scale import LossScale
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.options import LearnerOptions, WarmStartOptions
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.worker_group.workers import WorkerGroup


def warm_start(
    model: PackedModel,
    demonstrations: Sequence[TrainSequence],
    options: LearnerOptions,
    block: WarmStartOptions,
    *,
    seed: int,
    report: Callable[[float, float], None],
    check_stop: Callable[[], None],
    workers: WorkerGroup = SOLO,
) -> None:
    """Imitate the demonstrations for ``block.num_steps`` steps.

    Args:
        model: what is trained.
        demonstrations: at least one.
        options: the ``learner:`` block, for the optimizer and the size of micro-batches.
        block: its ``warm_start:`` block.
        seed: of the order of the demonstrations.
        report: called after each step with the fraction done and the loss.
        check_stop: called before each micro-batch; raises to end the warm start.
        workers: the ranks that the model is divided over.

    Raises:
        DivergedError: the loss or the gradient is not finite.
    """
    scale = LossScale(model.dtype)
    optimizer = MasterAdamW(
        model.model,
        options,
        scale=scale,
        workers=workers,
        copies=copies_group(workers, options),
        tensor_ranks=tensor_group(workers, options),
    )
    others = data_workers(workers, options)
    for step in warm_steps(demonstrations, block, seed=seed):
        loss = accumulate(model, step.sequences, options.max_tokens_per_micro_batch, check_stop, others, scale)
        norm = optimizer.step(step.learning_rate, loss=loss, name=step.name)
        scale.follow(has_overflown=not math.isfinite(norm), name=step.name)
        report(step.fraction, loss)
    optimizer.close()


def accumulate(
    model: PackedModel,
    batch: Sequence[TrainSequence],
    max_tokens: int,
    check_stop: Callable[[], None],
    workers: WorkerGroup = SOLO,
    scale: LossScale | None = None,
) -> float:
    """Add the gradient of the mean loss over the batch to the weights' gradients; returns that loss in nats. Each rank
    adds its own share of the gradient."""
    num_trained = sum(len(sequence.trained) for sequence in batch)
    division = model.divided(batch, num_ranks=workers.num_ranks, max_tokens=max_tokens)
    total = torch.zeros((), device=model.device)
    for micro_batch in laid_out(division.ranks[workers.rank], batch[0]):
        check_stop()
        logprobs = model.logprobs(micro_batch.packed, temperature=1.0)[: micro_batch.num_tokens]
        loss = -logprobs.sum() / num_trained
        torch.autograd.backward(loss if scale is None else scale.scaled(loss))
        total += loss.detach()
    return float(workers.sum_(total))
