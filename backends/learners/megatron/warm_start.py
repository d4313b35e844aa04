"""Supervised steps before version 0, on the optimizer of the steps after it, which then forgets them.

Invariants:

* Which demonstrations a step sees is a function of the seed (:mod:`~penstock.backends.learners.batch.warm_batches`).
* The loss is the mean of ``−log-prob`` over all response tokens of the batch, at temperature 1.
* Reinforcement starts with fresh moments, and with a fresh loss scale.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.backends.learners.batch.packing import divide_over_ranks
from penstock.backends.learners.batch.warm_batches import warm_steps
from penstock.backends.learners.megatron.layout.source_ranks import SourceRanks
from penstock.backends.learners.megatron.schedule.micro_batches import laid_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.batch.warm_batches import WarmStep
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores
    from penstock.backends.learners.options import LearnerOptions, WarmStartOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup


def warm_start(
    trainable: TrainableModel,
    demonstrations: Sequence[TrainSequence],
    options: LearnerOptions,
    block: WarmStartOptions,
    *,
    seed: int,
    report: Callable[[float, float], None],
    workers: WorkerGroup,
) -> None:
    """Imitate the demonstrations for ``block.num_steps`` steps.

    Args:
        trainable: what is trained.
        demonstrations: at least one.
        options: the ``learner:`` block, for the size of micro-batches.
        block: its ``warm_start:`` block.
        seed: of the order of the demonstrations.
        report: called after each step with the fraction done and the loss.
        workers: all ranks.

    Raises:
        DivergedError: the loss or the gradient is not finite.
    """
    sources = SourceRanks(workers, trainable.model.layout)
    for step in warm_steps(demonstrations, block, seed=seed):
        loss = accumulate(trainable, step, sources, max_tokens=options.max_tokens_per_micro_batch)
        norm = trainable.change(step.learning_rate, loss=loss, name=step.name)
        trainable.scale.follow(has_overflown=not math.isfinite(norm), name=step.name)
        report(step.fraction, loss)
    trainable.forget_moments()
    trainable.scale.begin_anew()


def accumulate(trainable: TrainableModel, step: WarmStep, sources: SourceRanks, *, max_tokens: int) -> float:
    """Find the gradient of the mean loss over the step; returns that loss in nats."""
    model = trainable.model
    division = divide_over_ranks(
        step.sequences,
        num_ranks=model.layout.data,
        max_tokens=max_tokens,
        hidden_size=model.architecture.hidden_size,
    )
    batches = laid_out(division.ranks[sources.replica], step.sequences[0], multiple=trainable.runner.multiple)

    def loss(number: int, scores: VocabularyScores) -> Tensor:
        return -batches.own(number, scores).logprobs.sum() / step.num_tokens

    losses = trainable.add_gradients(batches.sequences, loss, temperature=1.0)
    return sources.totals([{"loss": loss} for loss in losses])["loss"]
