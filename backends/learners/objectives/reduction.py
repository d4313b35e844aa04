"""How the losses of tokens become one number: weights, fixed for the whole step before it is split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean"]


def token_mean_weights(mask: Tensor) -> Tensor:
    """Weights ``[T]`` with ``Σ w·x = Σ x·mask / Σ mask`` over all tokens of the step."""
    return mask / mask.sum().clamp(min=1)


def sequence_mean_weights(mask: Tensor, sample_of: Tensor, num_samples: int) -> Tensor:
    """Weights ``[T]`` with ``Σ w·x`` = the mean over samples of each sample's mean over its trained tokens.

    Args:
        mask: 1.0 for trained tokens ``[T]``.
        sample_of: index in ``0 … num_samples − 1`` of the sample that a token belongs to ``[T]``; the parts of one
            sample share it, and so share one mean.
        num_samples: of the step. A sample without trained tokens counts in it, with the value 0.
    """
    tokens_per_sample = mask.new_zeros(num_samples).index_add(0, sample_of, mask)
    return mask / (tokens_per_sample.clamp(min=1)[sample_of] * num_samples)


def reduction_weights(reduction: Reduction, mask: Tensor, sample_of: Tensor, num_samples: int) -> Tensor:
    """The weights ``[T]`` of the named reduction; arguments as for :func:`sequence_mean_weights`."""
    match reduction:
        case "token_mean":
            return token_mean_weights(mask)
        case "sequence_mean":
            return sequence_mean_weights(mask, sample_of, num_samples)
        case _:
            assert_never(reduction)
