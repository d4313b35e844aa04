"""Weights that move a little from version to version, and their exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.backends.weights.pushing import PushExporter
    from penstock.messages.weights import WeightManifest


def weights_after(num_steps: int, num_weights: int) -> dict[str, torch.Tensor]:
    """After so many steps, each of which moves one in 500."""
    values = (torch.randn(num_weights, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    for step in range(num_steps):
        values[step::500] += 0.5
    return {"model.layers.0.mlp.up_proj.weight": values, "model.norm.weight": torch.full((7,), float(num_steps))}


def export_after(exporter: PushExporter, version: int, num_weights: int) -> WeightManifest:
    """The version that so many steps have made."""
    return exporter.export(weights_after(version, num_weights), version=version, publish=version, canary=None)
