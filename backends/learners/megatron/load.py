"""Reads this rank's share of a checkpoint from safetensors, and nothing else of it.

Invariants:

* What is read is what the blocks of this rank's parameters need: a few rows of a tensor, or a few columns.
* Every parameter is filled, or nothing is trained: a name or a shape that does not fit is an error.
"""

# safetensors is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import logging
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open

from penstock.backends.learners.megatron.families import EMBEDDING, EXPERT_BIAS, HEAD
from penstock.backends.learners.megatron.weight_map import global_name, map_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from penstock.backends.learners.megatron.build import ParallelModel
    from penstock.backends.learners.megatron.forms import Block
    from penstock.backends.learners.megatron.weight_map import Parameter, WeightMap

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_log = logging.getLogger(__name__)


class WeightLoadError(ValueError):
    """A checkpoint whose tensors are not those of its ``config.json``."""


class CheckpointReader:
    """The tensors of a folder, opened when they are first asked for. A context manager."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            WeightLoadError: there are no safetensors.
        """
        self._folder = folder
        self._files = _files_of(folder)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def slice(self, name: str) -> Any:  # noqa: ANN401 - safetensors has no name for it
        """A tensor that is read where it is indexed.

        Raises:
            WeightLoadError: it is not there.
        """
        file = self._files.get(name, _SINGLE if not self._files else None)
        if file is None:
            raise WeightLoadError(f"{self._folder}: no tensor {name}; the architecture in its config.json has one")
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            return self._open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise WeightLoadError(f"{self._folder / file}: {error}") from error

    def names(self) -> set[str]:
        """Of all tensors."""
        if self._files:
            return set(self._files)
        with safe_open(self._folder / _SINGLE, framework="pt") as file:
            return set(cast("list[str]", file.keys()))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


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
        WeightLoadError: the checkpoint does not have what the architecture says.
    """
    weights = weight_map_of(model)
    place = model.layout.place(rank)
    with CheckpointReader(folder) as reader:
        for name, own in own_parameters(model, rank):
            parameter = weights.parameters[name]
            shard = place.tensor if parameter.expert is None else place.expert_tensor
            if tuple(own.shape) != weights.part_shape(parameter):
                raise WeightLoadError(
                    f"{name}: the layout gives {list(weights.part_shape(parameter))}, and megatron-core's model has "
                    f"{list(own.shape)}; this is a mistake of the learner's"
                )
            own.zero_()
            for block in weights.blocks(parameter, shard):
                _read_block(reader, parameter, block, own)
        if rank == 0 and (left := _layers_beyond(reader, model.architecture.num_layers)):
            _log.warning(
                "%s: layers %s, beyond the model's %d, are left out: they predict several tokens at once, and are "
                "neither trained nor published", folder, ", ".join(map(str, left)), model.architecture.num_layers,
            )  # fmt: skip


def _layers_beyond(reader: CheckpointReader, num_layers: int) -> list[int]:
    """Of a checkpoint that has more layers than its ``config.json`` says."""
    found = {int(match[1]) for match in map(_LAYER.match, reader.names()) if match}
    return sorted(layer for layer in found if layer >= num_layers)


def own_parameters(model: ParallelModel, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of this rank by their names over the whole model. The copy of tied embeddings that a last stage
    holds goes by the name of these."""
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
            yield name, parameter.detach()


def layers_of(chunk: GPTModel) -> dict[int, int]:
    """Layer of the model, from 0, by layer of a stage."""
    return {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}


def _read_block(reader: CheckpointReader, parameter: Parameter, block: Block, own: Tensor) -> None:
    tensor = parameter.tensors[block.tensor]
    source = reader.slice(tensor.name)
    if tuple(source.get_shape()) != tensor.shape:
        raise WeightLoadError(
            f"{tensor.name}: expected {list(tensor.shape)} as config.json says, found {source.get_shape()}"
        )
    end = block.start + block.length
    values = source[:, block.start : end] if block.axis else source[block.start : end]
    own.narrow(block.axis, block.place, block.length).copy_(values)


def _files_of(folder: Path) -> dict[str, str]:
    """File by tensor; empty where one file has them all."""
    if (folder / _INDEX).is_file():
        found: dict[str, str] = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        return found
    if (folder / _SINGLE).is_file():
        return {}
    raise WeightLoadError(f"{folder}: neither {_INDEX} nor {_SINGLE} there; expected a Hugging Face checkpoint")
