"""What the loss of an optimizer step is told of its samples: their weights, which are pairs, which are desirable."""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from penstock.backends.learners.hooks.objective import reduction_by
from penstock.backends.learners.hooks.protocols import ReductionInput
from penstock.backends.learners.objectives.policy_loss import reduction_weights
from penstock.backends.learners.objectives.preference import preference_pairs
from penstock.backends.learners.objectives.protocol import Judged
from penstock.backends.learners.objectives.spec import loss_of

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.options import ObjectiveOptions


class KnownBatch(Protocol):
    """What is known of the batch that a step is part of."""

    @property
    def options(self) -> ObjectiveOptions: ...

    @property
    def rewards(self) -> Tensor:
        """Of each sample ``[S]``."""
        ...

    @property
    def group_ids(self) -> Tensor:
        """Of each sample ``[S]``."""
        ...

    @property
    def version(self) -> int:
        """Of the policy that opened the batch."""
        ...

    @property
    def device(self) -> torch.device: ...


def step_weights(update: Update, known: KnownBatch) -> tuple[Tensor, Tensor]:
    """The weight of each token of a sample ``[S]``: in the loss, and in a figure. That is a mean over tokens also where
    the loss is a sum over a constant, or what the user says."""
    options, sizes = known.options, torch.from_numpy(update.tokens_per_sample())
    if options.reduction_function is not None:
        samples = torch.from_numpy(update.batch_samples)
        given = ReductionInput(sizes.clone(), known.group_ids[samples], known.rewards[samples], known.version)
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


def pairs_of(known: KnownBatch, update: Update) -> Tensor | None:
    """The pairs of a step, by the numbers that its samples have there; None where the loss is not one of pairs."""
    if loss_of(known.options).unit != "pair":
        return None
    samples = torch.from_numpy(update.batch_samples)
    is_trained = torch.from_numpy(update.tokens_per_sample()) > 0
    pairs = preference_pairs(
        known.rewards[samples], known.group_ids[samples], is_trained, pairing=known.options.dpo_pairs
    )
    return pairs.to(known.device)


def judged_of(known: KnownBatch, update: Update, reference_point: Tensor | None) -> Judged | None:
    """What KTO is told of the samples of a step; None for other losses."""
    if not loss_of(known.options).needs_reference_point:
        return None
    assert known.options.min_reward is not None, "the rules of the objective ask for it"
    is_desirable = known.rewards[torch.from_numpy(update.batch_samples)] >= known.options.min_reward
    zero = torch.zeros((), dtype=torch.float64)
    return Judged(
        is_desirable.to(known.device), (zero if reference_point is None else reference_point).to(known.device)
    )
