"""Advantages from rewards."""

# torch.unique has no types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON: Final = 1e-6


def group_normalized_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantages ``[S]``: each reward less the mean of its group, over the group's unbiased standard deviation.

    Samples belong together by ``group_ids [S]`` and by nothing else: neither their order nor the size of the groups
    matters, so a group that lost samples is normalised over those it has. A group of one has advantage 0. The sums
    are taken in float64, so that equal rewards give exactly equal, and hence vanishing, advantages.
    """
    _, group_of, sizes = cast(
        "tuple[Tensor, Tensor, Tensor]", torch.unique(group_ids, return_inverse=True, return_counts=True)
    )
    exact = rewards.double()
    centred = exact - (_sums(exact, group_of, len(sizes)) / sizes)[group_of]
    if normalize_std:
        variance = _sums(centred.square(), group_of, len(sizes)) / (sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)[group_of]
    return centred.to(rewards.dtype)


def _sums(values: Tensor, group_of: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, group_of, values)
