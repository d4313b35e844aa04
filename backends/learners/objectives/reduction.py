"""How the losses of tokens become one number: a weight for each token, fixed for the step before it is split.

The loss of a step is ``Σ weight · x`` over its trained tokens. All tokens of a sample have the same weight, so one
number a sample says it, and the parts of an episode, which share a sample, share it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean"]


def token_mean_weights(tokens_per_sample: Tensor) -> Tensor:
    """``Σ weight · x`` = the mean of ``x`` over all trained tokens of the step.

    Args:
        tokens_per_sample: trained tokens of each sample of the step ``[S]``, float32.

    Returns:
        The weight of each token of a sample ``[S]``.
    """
    return (1.0 / tokens_per_sample.sum().clamp(min=1)).expand_as(tokens_per_sample)


def sequence_mean_weights(tokens_per_sample: Tensor) -> Tensor:
    """``Σ weight · x`` = the mean over the samples of each one's mean over its trained tokens.

    A sample without trained tokens counts among the samples, with the value 0. Arguments and result as for
    :func:`token_mean_weights`.
    """
    return 1.0 / (tokens_per_sample.clamp(min=1) * tokens_per_sample.shape[0])


def reduction_weights(reduction: Reduction, tokens_per_sample: Tensor) -> Tensor:
    """The weights ``[S]`` of the named reduction."""
    match reduction:
        case "token_mean":
            return token_mean_weights(tokens_per_sample)
        case "sequence_mean":
            return sequence_mean_weights(tokens_per_sample)
        case _:
            assert_never(reduction)
