"""What ranks do in the tests of experts. Imported by ranks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import moe_plan
import numpy as np
import training_plan as plan
from weight_cases import CPU, gathered, opened

from penstock.backends.learners.megatron.model.build import close_groups
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
from penstock.backends.learners.megatron.schedule.packed import stand_in

if TYPE_CHECKING:
    import torch

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores


def balanced(
    rank: int, folder: str, keys: dict[str, Any], num_ranks: int, division: str
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Figures of each step, and on the first rank the weights after the last.

    Args:
        division: of the sequences of a step, ``four`` micro-batches or ``one``, or with a ``stand-in``.
    """
    keys = {**keys, "optimizer": {"adam_eps": plan.EPSILON}}
    model, options = opened(rank, folder, keys, num_ranks)
    trainable = TrainableModel(
        model, options, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY, max_grad_norm=plan.MAX_GRAD_NORM, device=CPU,
        temperature=plan.TEMPERATURE,
    )  # fmt: skip
    figures: list[dict[str, float]] = []
    for step in range(moe_plan.NUM_STEPS):
        batches = plan.micro_batches(step, model.architecture.vocab_size)
        count = plan.num_trained(batches)

        def loss(_: int, scores: VocabularyScores, count: int = count) -> torch.Tensor:
            return -scores.logprobs.sum() / count

        own = _own(batches, division, model.layout.data, model.layout.place(rank).data)
        result = trainable.step(own, loss, learning_rate=plan.LEARNING_RATE)
        figures.append({"loss": result.loss, "norm": result.grad_norm, **trainable.runner.further_figures})
    weights = {name: tensor.numpy() for bucket in gathered(model, rank) for name, tensor in bucket}
    close_groups()
    return figures, weights


def _own(batches: list[list[TrainSequence]], division: str, num_data: int, data: int) -> list[list[TrainSequence]]:
    if division == "one":
        batches = [[sequence for batch in batches[rank::num_data] for sequence in batch] for rank in range(num_data)]
    own = batches[data::num_data]
    return [*own, [stand_in(own[0][0])]] if division == "stand-in" else own


def replayed(
    rank: int, folder: str, keys: dict[str, Any], num_ranks: int, lengths: list[list[int]], choices: str | list[Any]
) -> tuple[list[Any], list[Any], dict[str, Any], list[int]]:
    """Log-probs before and after one step, both with the experts of the plan or with these, on the first rank the
    weights after it, and which micro-batches they are of."""
    keys = {**keys, "optimizer": {"adam_eps": plan.EPSILON}}
    model, options = opened(rank, folder, {**keys, "router_replay": choices != "ignored"}, num_ranks)
    trainable = TrainableModel(
        model, options, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY, max_grad_norm=plan.MAX_GRAD_NORM, device=CPU,
        temperature=plan.TEMPERATURE,
    )  # fmt: skip
    batches = moe_plan.recorded(
        lengths, model.architecture.vocab_size, choices, num_layers=model.architecture.num_layers
    )
    count = plan.num_trained(batches)
    data = model.layout.place(rank).data
    own = batches[data :: model.layout.data]

    def loss(_: int, scores: VocabularyScores) -> torch.Tensor:
        return -scores.logprobs.sum() / count

    before = trainable.runner.scores(own)
    trainable.step(own, loss, learning_rate=plan.LEARNING_RATE)
    after = trainable.runner.scores(own)
    weights = {name: tensor.numpy() for bucket in gathered(model, rank) for name, tensor in bucket}
    close_groups()
    numbers = list(range(len(batches)))[data :: model.layout.data]
    return [np.asarray(s.logprobs) for s in before], [np.asarray(s.logprobs) for s in after], weights, numbers
