"""What :mod:`penstock.backends.learners.training.flops` has to know of a model that megatron-core trains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backends.learners.megatron.bridge.families import EMBEDDING, HEAD
from penstock.backends.learners.megatron.bridge.weight_map import parameters_of
from penstock.backends.learners.training.flops import Config, ModelShape, Speed, model_shape, peak_tflops

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.options import LearnerOptions


class _Weight(NamedTuple):
    """A tensor of the checkpoint; all of them are trained."""

    shape: tuple[int, ...]
    requires_grad: bool = True

    def numel(self) -> int:
        return math.prod(self.shape)


def speed_of(
    architecture: Architecture, options: LearnerOptions, *, precision: str, device: torch.device, num_ranks: int
) -> Speed:
    """Of the steps of this model."""
    peak = options.peak_tflops
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device), precision)
    return Speed(shape=shape_of(architecture), peak_tflops=peak, num_ranks=num_ranks, num_passes=options.num_passes)


def shape_of(architecture: Architecture) -> ModelShape | None:
    """The cost of a model, from the tensors of its checkpoint."""
    parameters = list(parameters_of(architecture))
    weights = {tensor.name: _Weight(tensor.shape) for parameter in parameters for tensor in parameter.tensors}
    tables, heads = (
        [tensor.name for parameter in parameters if parameter.name == rule.megatron for tensor in parameter.tensors]
        for rule in (EMBEDDING, HEAD)
    )
    experts = architecture.experts
    config = Config(
        num_layers=architecture.num_layers,
        num_heads=architecture.num_heads,
        key_dim=architecture.head_dim,
        value_dim=architecture.head_dim,
        num_experts=experts.count if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
    )
    head = weights[(heads or tables)[0]]
    return model_shape(weights, config, embeddings=frozenset(tables), head=head)
