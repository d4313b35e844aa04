"""How the losses of tokens become one number: a weight for each token, fixed for the step before it is split.

The loss of a step is ``Σ weight · x`` over its trained tokens. All tokens of a sample have the same weight, so one
number a sample says it, and the parts of an episode, which share a sample, share it too. A token that a correction
takes out keeps its place in these counts: there is one denominator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.objective_names import Reduction


def token_mean_weights(tokens_per_sample: Tensor) -> Tensor:
    """``Σ weight · x`` = the mean of ``x`` over all trained tokens of the step (DAPO, arXiv 2503.14476).

    Args:
        tokens_per_sample: trained tokens of each sample of the step ``[S]``, float32.

    Returns:
        The weight of each token of a sample ``[S]``.
    """
    return (1.0 / tokens_per_sample.sum().clamp(min=1)).expand_as(tokens_per_sample)


def sequence_mean_weights(tokens_per_sample: Tensor) -> Tensor:
    """``Σ weight · x`` = the mean over the samples of each one's mean over its trained tokens (GRPO,
    arXiv 2402.03300).

    A sample without trained tokens counts among the samples, with the value 0. Arguments and result as for
    :func:`token_mean_weights`.
    """
    return 1.0 / (tokens_per_sample.clamp(min=1) * tokens_per_sample.shape[0])


def constant_weights(tokens_per_sample: Tensor, *, num_tokens: int) -> Tensor:
    """``Σ weight · x`` = the mean over the samples of each one's sum over its trained tokens, over a constant.

    Dr. GRPO, Liu et al., arXiv 2503.20783: with the longest response that is possible as the constant, a long response
    is neither favoured nor punished. Other arguments and result as for :func:`token_mean_weights`.
    """
    return tokens_per_sample.new_full(tokens_per_sample.shape, 1.0 / (num_tokens * tokens_per_sample.shape[0]))


def reduction_weights(reduction: Reduction, tokens_per_sample: Tensor, *, constant_tokens: int | None = None) -> Tensor:
    """The weights ``[S]`` of the named reduction; ``constant`` needs ``constant_tokens``."""
    match reduction:
        case "token_mean":
            return token_mean_weights(tokens_per_sample)
        case "sequence_mean":
            return sequence_mean_weights(tokens_per_sample)
        case "constant":
            if constant_tokens is None:
                raise ValueError("reduction: constant needs constant_tokens, the longest response in tokens")
            return constant_weights(tokens_per_sample, num_tokens=constant_tokens)
        case _:
            assert_never(reduction)
