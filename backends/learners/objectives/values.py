"""The loss of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class ValueLoss(NamedTuple):
    """Per token ``[N]``."""

    loss: Tensor
    clipped: Tensor
    """1.0 where the value moved by more than the bound."""


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float) -> ValueLoss:
    """``max((V_c − G)², (V − G)²)`` with ``V_c = V_old + clip(V − V_old, ±value_clip)`` for each token, without a ½.

    Schulman et al., arXiv 1707.06347, as in the code that belongs to it.

    Args:
        values: of the critic that is trained ``[N]``; the gradient flows through it.
        old_values: of the critic before the step ``[N]``.
        returns: what is to be predicted ``[N]``.
        value_clip: how far a value may move in one step.
    """
    moved = values - old_values
    bounded = old_values + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((bounded - returns).square(), (values - returns).square())
    return ValueLoss(loss=loss, clipped=(moved.detach().abs() > value_clip).to(loss.dtype))
