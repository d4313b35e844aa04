"""The recurrence behind discounted returns and GAE, for all samples of a batch at once.

``y_i = x_i + a_i · y_{i+1}`` along the last axis, by doubling: after pass ``k`` each place holds the part of its sum
that the next ``2^k`` places contribute, so the number of passes over the batch is the logarithm of its longest sample.
A factor of 0 ends a sample, so samples of any lengths stand end to end without padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def reverse_recurrence(inputs: Tensor, factors: Tensor, *, longest: int) -> Tensor:
    """``y_i = x_i + a_i · y_{i+1}`` with ``y = 0`` after the last place.

    Args:
        inputs: ``x [..., N]``.
        factors: ``a [..., N]``; 0 at the last place of a sample.
        longest: no more than so many places in a row belong together.
    """
    found, factor, step = inputs.clone(), factors.clone(), 1
    while step < min(longest, inputs.shape[-1]):
        # What is added is made before anything is overwritten, so the places may overlap.
        found[..., :-step] += factor[..., :-step] * found[..., step:]
        factor[..., :-step] *= factor[..., step:].clone()
        step *= 2
    return found
