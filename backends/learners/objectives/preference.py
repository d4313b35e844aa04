"""Learning from pairs of responses, one preferred to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class PreferenceLoss(NamedTuple):
    """Per pair ``[B]``."""

    loss: Tensor
    margin: Tensor
    """``β · ((log π − log π_ref) of the chosen less that of the rejected response)``, without gradient."""


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_reference: Tensor,
    rejected_reference: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """``−(1 − ε) · log σ(m) − ε · log σ(−m)`` with ``m = β · ((c − c_ref) − (r − r_ref))`` for each pair.

    DPO, Rafailov et al., arXiv 2305.18290; ε, the share of pairs that are labelled the wrong way round, is Mitchell's
    conservative DPO.

    Args:
        chosen_logprobs: of the whole preferred response, summed over its trained tokens ``[B]``; with gradient.
        rejected_logprobs: of the other one ``[B]``; with gradient.
        chosen_reference: the same of the reference policy ``[B]``.
        rejected_reference: ``[B]``.
        beta: strength of the pull to the reference.
        label_smoothing: ε, from 0 to ½.
    """
    margin = beta * ((chosen_logprobs - chosen_reference) - (rejected_logprobs - rejected_reference))
    loss = -(1.0 - label_smoothing) * functional.logsigmoid(margin) - label_smoothing * functional.logsigmoid(-margin)
    return PreferenceLoss(loss=loss, margin=margin.detach())
