"""What ranks do in the tests of layers that predict further tokens. Imported by ranks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import training_plan as plan
from weight_cases import CPU, gathered, opened

from penstock.backends.learners.megatron.model.build import close_groups
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel

if TYPE_CHECKING:
    import torch

    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores

Figures = list[tuple[float, float, float, float | None]]


def trained(rank: int, folder: str, keys: dict[str, Any], num_ranks: int) -> tuple[Figures, dict[str, Any]]:
    """Of every step loss, gradient norm, loss of these layers and their norm where it is one of their own; and on the
    first rank the weights after the last."""
    keys = {**keys, "optimizer": {**keys.get("optimizer", {}), "adam_eps": plan.EPSILON}}
    model, options = opened(rank, folder, keys, num_ranks)
    trainable = TrainableModel(
        model, options, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY, max_grad_norm=plan.MAX_GRAD_NORM, device=CPU,
        temperature=plan.TEMPERATURE,
    )  # fmt: skip
    share = plan.NUM_MICRO_BATCHES // model.layout.data
    first = share * model.layout.place(rank).data
    figures: Figures = []
    for step in range(plan.NUM_STEPS):
        batches = plan.micro_batches(step, model.architecture.vocab_size)
        count = plan.num_trained(batches)

        def loss(_: int, scores: VocabularyScores, count: int = count) -> torch.Tensor:
            return -(scores.logprobs.sum() + plan.ENTROPY_COEF * scores.entropy.sum()) / count

        result = trainable.step(batches[first : first + share], loss, learning_rate=plan.LEARNING_RATE)
        further = trainable.runner.further_figures.get("train/mtp_loss", 0.0)
        figures.append((result.loss, result.grad_norm, further, trainable.further_norm))
        trainable.runner.scores(batches[first : first + share])  # in which these layers have no part
    trainable.gather_weights()
    weights = {name: tensor.numpy() for bucket in gathered(model, rank) for name, tensor in bucket}
    close_groups()
    return figures, weights
