"""What ranks do in the tests of the step. Imported by ranks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import training_plan as plan
from weight_cases import CPU, gathered, opened

from penstock.backends.learners.megatron.model.build import close_groups
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores


def num_calls(rank: int, folder: str, keys: dict[str, Any], num_ranks: int) -> tuple[int, int]:
    """How often the first layer's attention, and its core, are computed in a step of all micro-batches."""
    model, options = opened(rank, folder, keys, num_ranks)
    trainable = TrainableModel(
        model, options, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY, max_grad_norm=plan.MAX_GRAD_NORM, device=CPU
    )
    attention: Any = model.chunks[0].decoder.layers[0].self_attention
    calls = [0, 0]

    def count(index: int) -> Callable[..., None]:
        def one_more(*_: object) -> None:
            calls[index] += 1

        return one_more

    for index, module in enumerate((attention, attention.core_attention)):
        module.register_forward_hook(count(index))

    def loss(_: int, scores: VocabularyScores) -> torch.Tensor:
        return -scores.logprobs.sum()

    trainable.step(plan.micro_batches(0, model.architecture.vocab_size), loss, learning_rate=plan.LEARNING_RATE)
    close_groups()
    return calls[0], calls[1]


def trained(
    rank: int, folder: str, keys: dict[str, Any], num_ranks: int, synchronises: bool
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Loss and gradient norm of every step, and on the first rank the weights after the last.

    Args:
        synchronises: whether updated weights are gathered before they leave.
    """
    keys = {**keys, "optimizer": {**keys.get("optimizer", {}), "adam_eps": plan.EPSILON}}
    model, options = opened(rank, folder, keys, num_ranks)
    trainable = TrainableModel(
        model, options, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY, max_grad_norm=plan.MAX_GRAD_NORM, device=CPU,
        temperature=plan.TEMPERATURE,
    )  # fmt: skip
    share = plan.NUM_MICRO_BATCHES // model.layout.data
    first = share * model.layout.place(rank).data
    figures: list[tuple[float, float]] = []
    for step in range(plan.NUM_STEPS):
        batches = plan.micro_batches(step, model.architecture.vocab_size)
        count = plan.num_trained(batches)

        def loss(_: int, scores: VocabularyScores, count: int = count) -> torch.Tensor:
            return -(scores.logprobs.sum() + plan.ENTROPY_COEF * scores.entropy.sum()) / count

        result = trainable.step(batches[first : first + share], loss, learning_rate=plan.LEARNING_RATE)
        figures.append((result.loss, result.grad_norm))
    if synchronises:
        trainable.gather_weights()
    weights = {name: tensor.numpy() for bucket in gathered(model, rank) for name, tensor in bucket}
    close_groups()
    return figures, weights
