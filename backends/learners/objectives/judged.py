"""Learning from responses that are judged one by one: desirable, or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.objectives.objective import RATIOS, always_reported, weighted
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions


def kto_loss(
    log_ratios: Tensor,
    is_desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``λ − v`` of each response ``[S]``, with ``v = λ_D · σ(β · (r − z0))`` of a desirable one and
    ``v = λ_U · σ(β · (z0 − r))`` of another.

    KTO, Ethayarajh et al., arXiv 2402.01306 (equation 7).

    Args:
        log_ratios: ``r = log π − log π_ref`` of whole responses ``[S]``; with gradient.
        is_desirable: ``[S]``
        reference_point: ``z0``, a scalar; no gradient flows through it.
        beta: β.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
    """
    good = is_desirable.to(log_ratios.dtype)
    weights = undesirable_weight + (desirable_weight - undesirable_weight) * good
    return weights * torch.sigmoid(beta * (1.0 - 2.0 * good) * (log_ratios - reference_point.detach()))


def kto_objective(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    """The mean of KTO's loss over the responses of the step that have a trained token."""
    assert tokens.judged is not None, "policy_loss: kto"
    assert tokens.reference_logprobs is not None, "KTO has a reference"
    # In float64, as for pairs: sums over whole responses.
    ratios = tokens.samples.sums(tokens.logprobs.double() - tokens.reference_logprobs.double())
    is_here = tokens.samples.sizes(tokens.logprobs) > 0
    is_desirable = tokens.judged.is_desirable
    losses = kto_loss(
        ratios,
        is_desirable,
        tokens.judged.reference_point,
        beta=options.dpo_beta,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
    )
    number = is_here.sum().clamp(min=1)
    loss = (losses * is_here).sum(dtype=torch.float64) / number
    gained = options.dpo_beta * ratios.detach()
    figures = {
        **always_reported(tokens),
        "train/kto_kl": tokens.judged.reference_point * bool(is_here.any()),
        "train/desirable_ratio": (is_here & is_desirable).sum() / number,
        "train/entropy_loss": weighted(tokens.figure_weights, tokens.entropy.detach()),
        "train/loss": loss.detach(),
    }
    kinds = {"desirable": is_here & is_desirable, "undesirable": is_here & ~is_desirable}
    for kind, which in kinds.items():
        total, count = RATIOS[f"train/kto_{kind}_reward"]
        figures |= {total: (gained * which).sum(), count: which.sum().double()}
    return ObjectiveTerms(loss=loss, figures=figures)
