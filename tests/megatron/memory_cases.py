"""What ranks do in the tests of memory. Imported by ranks only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from offload_cases import built, small_options, trainable_model
from weight_cases import sequences

from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.layout.memory import estimate_stages
from penstock.backends.learners.megatron.layout.stages import layers_of_pieces
from penstock.backends.learners.megatron.model.build import close_groups, open_groups
from penstock.backends.learners.megatron.optimizer.offload import optimizer_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from penstock.backends.learners.megatron.layout.model_config import Precision
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores

MAX_TOKENS = 256
NUM_MICRO_BATCHES = 4


class Kept:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, meter: SavedBytes, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        meter.add(tensor)

    def __del__(self) -> None:
        self._meter.remove(self.tensor)


class SavedBytes:
    """Bytes that autograd keeps, each piece of memory once, and the most there were at a time."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._counts = Counter[int]()
        self._now = self.most = 0

    def keep(self, tensor: Tensor) -> Kept:
        return Kept(self, tensor)

    def give(self, kept: Kept) -> Tensor:
        return kept.tensor

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return
        self._counts[storage.data_ptr()] += 1
        if self._counts[storage.data_ptr()] == 1:
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)

    def remove(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return
        self._counts[storage.data_ptr()] -= 1
        if not self._counts[storage.data_ptr()]:
            self._now -= storage.nbytes()


def taken(rank: int, folder: str, keys: dict[str, Any], num_ranks: int, precision: Precision) -> dict[str, Any]:
    """Bytes of this rank by kind, as they are and as they were estimated for its stage."""
    options = small_options(keys)
    layout = layout_of(options, num_ranks)
    open_groups(layout, seed=1)
    trainable = trainable_model(built(rank, folder, options, num_ranks, precision), options)
    weights: list[Any] = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    meter = SavedBytes([*weights, *(parameter.main_grad for parameter in weights)])
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, meter.give):
        step(trainable)
    seen: dict[int, int] = {}
    found = {
        "weights": new_bytes(weights, seen),
        "gradients": new_bytes((parameter.main_grad for parameter in weights), seen),
        "optimizer": new_bytes(optimizer_tensors(trainable.optimizer), seen),
        "activations": meter.most,
    }
    estimates = estimate_stages(
        trainable.model.architecture, layout, options, precision=precision, max_tokens=MAX_TOKENS
    )
    estimate = estimates[layout.place(rank).stage]
    close_groups()
    expected = {
        name: getattr(estimate, name) for name in ("weights", "gradients", "optimizer", "activations", "logits")
    }
    return {"found": found, "expected": expected}


def step(trainable: TrainableModel) -> None:
    def loss(_: int, scores: VocabularyScores) -> Tensor:
        return -scores.logprobs.sum() / 1000

    vocab_size = trainable.model.architecture.vocab_size
    batches = [sequences(vocab_size, [MAX_TOKENS + 1], seed=number) for number in range(NUM_MICRO_BATCHES)]
    trainable.step(batches, loss, learning_rate=1e-3)


def new_bytes(tensors: Iterable[Tensor], seen: dict[int, int]) -> int:
    """Of memory that was not seen before."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu" and tensor.ndim]
    new = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in seen}
    seen |= new
    return sum(new.values())


def stage_layers(rank: int, num_layers: int, keys: dict[str, Any], num_ranks: int) -> tuple[list[int], list[int]]:
    """Layers of each piece that this rank has, by megatron-core's count and by ours."""
    options = small_options(keys)
    layout = layout_of(options, num_ranks)
    pieces = layers_of_pieces(
        num_layers, num_stages=layout.pipeline, pieces_per_stage=layout.virtual_pipeline, fields=options.transformer
    )
    open_groups(layout, seed=1)
    config: Any = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        **options.transformer,
    )  # fmt: skip
    theirs = [get_num_layers_to_build(config, vp_stage=piece) for piece in range(layout.virtual_pipeline)]
    close_groups()
    return theirs, list(pieces[layout.place(rank).stage :: layout.pipeline])
