"""Rotary position embedding as one complex multiplication.

The two dimensions that turn together stand side by side here (Hugging Face keeps them half a head apart; the fused
weights are permuted to match). Queries and keys are permuted alike, so their products are what they were.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.backends.checkpoint.model_config import ModelConfig


def rotation_table(config: ModelConfig, length: int, device: torch.device) -> torch.Tensor:
    """``[length, head_dim / 2]`` complex64: what position ``p`` multiplies each pair of dimensions by.

    Frequencies and angles are rounded to float32 at the same places as in transformers, so that far positions do
    not drift from what the learner computes.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents) / config.rope_divisor
    scaling = config.llama3_scaling
    if scaling is not None:
        turns = scaling.original_context / (2 * math.pi / frequencies)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        frequencies = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(device)


def rotate_in_place(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Turn ``heads [N, heads, head_dim]`` by ``rotation [N, 1, head_dim / 2]``; other dtypes than float32 are turned
    in float32 and rounded once."""
    if heads.dtype == torch.float32:
        _pairs(heads).mul_(rotation)
        return
    turned = _pairs(heads.float()).mul_(rotation)
    heads.copy_(torch.view_as_real(turned).flatten(-2))


def _pairs(heads: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
