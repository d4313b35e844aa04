"""Learning from pairs of responses, one preferred to the other."""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, assert_never, cast

import torch
from torch.nn import functional

from penstock.backends.learners.objectives.objective import always_reported, weighted
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.objective_names import Pairing, PairLoss
    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions


class PreferenceLoss(NamedTuple):
    """Per pair ``[B]``."""

    loss: Tensor
    margin: Tensor
    """``β · ((log π − log π_ref) of the chosen less that of the rejected response)``, without gradient."""


def pair_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_reference: Tensor,
    rejected_reference: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: PairLoss = "sigmoid",
) -> PreferenceLoss:
    """Of each pair, with ``h = (c − c_ref) − (r − r_ref)`` and ``m = β · h``.

    ``sigmoid``: ``−(1 − ε) · log σ(m) − ε · log σ(−m)``. DPO, Rafailov et al., arXiv 2305.18290; ε, the share of pairs
    that are labelled the wrong way round, is Mitchell's conservative DPO. With means over tokens in place of sums it is
    the length-normalised DPO of Tülu 3, arXiv 2411.15124 (equation 6).

    ``ipo``: ``(h − 1 / (2 β))²``, where β is the τ of the paper. IPO, Azar et al., arXiv 2310.12036 (equation 17).

    Args:
        chosen_logprobs: of the whole preferred response, summed over its trained tokens, or their mean ``[B]``; with
            gradient.
        rejected_logprobs: of the other one ``[B]``; with gradient.
        chosen_reference: the same of the reference policy ``[B]``.
        rejected_reference: ``[B]``.
        beta: strength of the pull to the reference.
        label_smoothing: ε, from 0 to ½; 0 for ``ipo``.
        kind: which loss.
    """
    gap = (chosen_logprobs - chosen_reference) - (rejected_logprobs - rejected_reference)
    margin = beta * gap
    match kind:
        case "sigmoid":
            right, wrong = functional.logsigmoid(margin), functional.logsigmoid(-margin)
            loss = -(1.0 - label_smoothing) * right - label_smoothing * wrong
        case "ipo":
            loss = (gap - 1.0 / (2.0 * beta)).square()
        case _:
            assert_never(kind)
    return PreferenceLoss(loss=loss, margin=margin.detach())


def preference_pairs(rewards: Tensor, group_ids: Tensor, is_trained: Tensor, *, pairing: Pairing) -> Tensor:
    """The better and the worse sample of each pair, int64 ``[B, 2]``.

    Both are of one group, by its id, and their rewards differ. ``best_worst`` makes one pair of a group, of the first
    of its best and the first of its worst samples; ``all`` every one there is.

    Args:
        rewards: of the samples ``[S]``.
        group_ids: ``[S]``
        is_trained: False for a sample without any trained token, which is in no pair ``[S]``.
        pairing: which.
    """
    values = cast("list[float]", rewards.tolist())
    ids, trained = cast("list[int]", group_ids.tolist()), cast("list[bool]", is_trained.tolist())
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(ids):
        if trained[sample]:
            groups.setdefault(group, []).append(sample)
    found: list[tuple[int, int]] = []
    for members in groups.values():
        if pairing == "all":
            found += [(a, b) for a in members for b in members if values[a] > values[b]]
            continue
        best, worst = max(members, key=values.__getitem__), min(members, key=values.__getitem__)
        if values[best] > values[worst]:
            found.append((best, worst))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def preference_objective(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    """The mean of the loss over the pairs of the step; tokens that are not trained are in no sum. Without any pair it
    is 0, and so is its gradient."""
    assert tokens.pairs is not None, "policy_loss: dpo"
    assert tokens.reference_logprobs is not None, "DPO has a reference"
    chosen, rejected = tokens.pairs.unbind(dim=1)
    # In float64: the loss is about small differences of sums that are large.
    together = tokens.samples.means if options.dpo_normalize_length else tokens.samples.sums
    whole = together(tokens.logprobs.double())
    reference = together(tokens.reference_logprobs.double())
    found = pair_loss(
        whole[chosen],
        whole[rejected],
        reference[chosen],
        reference[rejected],
        beta=options.dpo_beta,
        label_smoothing=options.dpo_label_smoothing,
        kind=options.dpo_loss,
    )
    number = max(1, len(chosen))
    loss = found.loss.sum(dtype=torch.float64) / number
    gained = options.dpo_beta * (whole - reference).detach()
    per_pair = {
        "train/dpo_accuracy": (found.margin > 0).double(),
        "train/dpo_margin": found.margin,
        "train/dpo_chosen_reward": gained[chosen],
        "train/dpo_rejected_reward": gained[rejected],
    }
    figures = {
        **always_reported(tokens),
        **{name: value.sum(dtype=torch.float64) / number for name, value in per_pair.items()},
        "train/entropy_loss": weighted(tokens.figure_weights, tokens.entropy.detach()),
        "train/num_pairs": loss.new_tensor(len(chosen)),
        "train/loss": loss.detach(),
    }
    return ObjectiveTerms(loss=loss, figures=figures)
