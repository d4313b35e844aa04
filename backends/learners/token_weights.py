"""What each trained token of an optimizer step weighs, in the loss and in the figures."""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.hooks.objective import reduction_by
from penstock.backends.hooks.protocols import ReductionInput
from penstock.backends.learners.objectives.reduction import reduction_weights

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.learners.updates import Update


def step_weights(
    update: Update, options: ObjectiveOptions, *, rewards: Tensor, group_ids: Tensor, version: int
) -> tuple[Tensor, Tensor]:
    """The weight of each token of a sample ``[S]``: in the loss, and in a figure. That is a mean over tokens also where
    the loss is a sum over a constant, or what the user says.

    Args:
        update: the step.
        options: which reduction.
        rewards: of the whole batch, for a function of the user's, as are the others.
        group_ids: likewise.
        version: of the policy that opened the batch.
    """
    sizes = torch.from_numpy(update.tokens_per_sample())
    if options.reduction_function is not None:
        samples = torch.from_numpy(update.batch_samples)
        given = ReductionInput(sizes.clone(), group_ids[samples], rewards[samples], version)
        return reduction_by(options.reduction_function, given, options), reduction_weights("token_mean", sizes)
    weights = reduction_weights(options.reduction, sizes, constant_tokens=options.constant_tokens)
    return weights, reduction_weights("token_mean", sizes) if options.reduction == "constant" else weights


def means_by_loss(update: Update, means: Tensor) -> Tensor:
    """The weights of figures ``[S]`` so that each is a mean over the tokens of the objective, or over those that are
    imitated, where a step has both."""
    is_imitated = torch.zeros(update.num_samples, dtype=torch.bool)
    is_imitated[[s.sample for s in update.sequences if s.is_imitated]] = True
    if not bool(is_imitated.any()):
        return means
    shares = means * torch.from_numpy(update.tokens_per_sample())
    totals = torch.stack([shares[~is_imitated].sum(), shares[is_imitated].sum()])
    return means / totals.clamp(min=torch.finfo(means.dtype).tiny)[is_imitated.long()]
