"""Reads this rank's share of a checkpoint from safetensors, and nothing else of it.

Invariants:

* What is read is what the blocks of this rank's parameters need: a few rows of a tensor, or a few columns.
* Every parameter is filled, or nothing is trained: a name or a shape that does not fit is an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from penstock.backends.checkpoint.layers_beyond import layers_beyond
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.learners.checkpoints.record import CheckpointError
from penstock.backends.learners.megatron.bridge.families import EMBEDDING, EXPERT_BIAS, HEAD
from penstock.backends.learners.megatron.bridge.weight_map import global_name, map_weights, mtp_copies
from penstock.backends.learners.training.freezing import frozen_weights
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.bridge.forms import Block
    from penstock.backends.learners.megatron.bridge.weight_map import Parameter, WeightMap
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.options import LearnerOptions

_log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 4096


def weight_map_of(model: ParallelModel) -> WeightMap:
    """The weights of a model for its layout."""
    return map_weights(
        model.architecture,
        num_tensor=model.layout.tensor,
        num_expert_tensor=model.layout.expert_tensor,
        padded_vocab_size=model.padded_vocab_size,
    )


@torch.no_grad()
def load_weights(model: ParallelModel, folder: Path, *, rank: int) -> None:
    """Fill this rank's share.

    Raises:
        UserFault: there are no safetensors.
        CheckpointError: they are not those that the architecture has.
    """
    weights = weight_map_of(model)
    place = model.layout.place(rank)
    with CheckpointTensors(folder) as reader:
        for name, own in own_parameters(model, rank):
            parameter = weights.parameters[name]
            shard = place.tensor if parameter.expert is None else place.expert_tensor
            if tuple(own.shape) != weights.part_shape(parameter):
                raise CheckpointError(
                    f"{name}: the layout gives {list(weights.part_shape(parameter))}, and megatron-core's model has "
                    f"{list(own.shape)}; this is a mistake of the learner's"
                )
            own.zero_()
            for block in weights.blocks(parameter, shard):
                _read_block(reader, parameter, block, own)
        if model.architecture.num_mtp_layers and rank == 0:
            _check_copies(reader, model.architecture)
        elif rank == 0 and (left := sorted(set(layers_beyond(reader, model.architecture.num_layers).values()))):
            _log.warning(
                "%s: layers %s, beyond the model's %d, are left out: they predict several tokens at once, and are "
                "neither trained nor published without learner.megatron.mtp; what is saved keeps them as they are",
                folder, ", ".join(map(str, left)), model.architecture.num_layers,
            )  # fmt: skip


def _check_copies(reader: CheckpointTensors, architecture: Architecture) -> None:
    """Layers that predict further tokens share embedding and output head with the model.

    Raises:
        CheckpointError: the checkpoint's have others.
    """
    for copy, original in mtp_copies(architecture).items():
        if copy not in reader:
            continue
        own, trunk = reader.slice(copy), reader.slice(original)
        num_rows = int(own.get_shape()[0])
        is_same = own.get_shape() == trunk.get_shape() and all(
            torch.equal(own[start : start + _ROWS_AT_ONCE], trunk[start : start + _ROWS_AT_ONCE])
            for start in range(0, num_rows, _ROWS_AT_ONCE)
        )
        if not is_same:
            raise CheckpointError(
                f"{copy} is another matrix than {original}, and layers that predict further tokens are trained with "
                "the model's own embedding and output head; remove learner.megatron.mtp"
            )


def freeze(model: ParallelModel, options: LearnerOptions, *, rank: int) -> None:
    """Leave the weights as they are that ``learner.freeze`` names. Before they get gradients and an optimizer.

    Raises:
        UserFault: see :func:`.frozen_weights`; or a pipeline stage of this rank has nothing to train.
    """
    weights = {
        name: [tensor.name for tensor in parameter.tensors]
        for name, parameter in weight_map_of(model).parameters.items()
        if not parameter.is_buffer
    }
    frozen = frozen_weights(options, weights)
    for name, parameter in named_parameters(model, rank):
        if name in frozen:
            parameter.requires_grad_(False)
    if not all(any(parameter.requires_grad for parameter in chunk.parameters()) for chunk in model.chunks):
        raise UserFault(
            f"learner.{'freeze' if options.freeze else 'train_only'}: every weight of the pipeline stage of rank "
            f"{rank} is frozen, and no gradient could pass it; set learner.megatron.pipeline_parallel: 1, or train a "
            "part of it"
        )


def own_parameters(model: ParallelModel, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of this rank, detached; names as of :func:`named_parameters`."""
    return ((name, parameter.detach()) for name, parameter in named_parameters(model, rank))


def named_parameters(model: ParallelModel, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of this rank, and the biases of its routers, by their names over the whole model. The copy of tied
    embeddings that a last stage holds goes by the name of these."""
    experts = model.architecture.experts
    per_rank = experts.count // model.layout.expert if experts else 0
    first_expert = per_rank * model.layout.place(rank).expert
    for chunk in model.chunks:
        layers = layers_of(chunk)
        buffers = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(EXPERT_BIAS)]
        for local, parameter in (*chunk.named_parameters(), *buffers):
            name = global_name(local, layers=layers, first_expert=first_expert)
            if name == HEAD.megatron and model.architecture.has_tied_embeddings:
                name = EMBEDDING.megatron
            yield name, parameter


def layers_of(chunk: GPTModel) -> dict[int, int]:
    """Layer of the model, from 0, by layer of a stage."""
    return {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}


def _read_block(reader: CheckpointTensors, parameter: Parameter, block: Block, own: Tensor) -> None:
    tensor = parameter.tensors[block.tensor]
    source = reader.slice(tensor.name)
    if tuple(source.get_shape()) != tensor.shape:
        raise CheckpointError(
            f"{tensor.name}: expected {list(tensor.shape)} as config.json says, found {source.get_shape()}"
        )
    end = block.start + block.length
    values = source[:, block.start : end] if block.axis else source[block.start : end]
    own.narrow(block.axis, block.place, block.length).copy_(values)
