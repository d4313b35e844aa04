"""The policy that the KL term pulls to: a second share of the model on each rank, without gradients or optimizer.

Invariants:

* Between two refreshes its weights do not change, so a checkpoint need not copy them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.model.build import ParallelModel


def frozen(model: ParallelModel) -> ParallelModel:
    """The same model, never to be trained."""
    for chunk in model.chunks:
        chunk.requires_grad_(requires_grad=False)
    return model


@torch.no_grad()
def copy_weights(source: ParallelModel, target: ParallelModel) -> None:
    """Make a model of the same layout what another is now, in the memory that it has."""
    for own, other in zip(source.chunks, target.chunks, strict=True):
        tensors = dict(own.named_parameters()) | dict(own.named_buffers())
        for name, tensor in (*other.named_parameters(), *other.named_buffers()):
            tensor.copy_(tensors[name])
