"""Advantages from rewards.

Two shapes: per sample ``[S]`` for what is constant over a response, and per position ``[S, T]`` with a mask for what
is not. A mask is 1 where the model made the token and it is trained; every other position has no reward, no KL and
advantage 0, and takes no time: the trained token before it is followed by the one after it.
"""

# torch.unique has no types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.scan import reverse_recurrence
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON: Final = 1e-6
WHITEN_EPSILON: Final = 1e-8


def group_normalized_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantages ``[S]``: each reward less the mean of its group, over the group's unbiased standard deviation.

    ``A = (r − mean) / (std + 1e-6)``: GRPO, Shao et al., arXiv 2402.03300. Without the division: Dr. GRPO, Liu et
    al., arXiv 2503.20783.

    Samples belong together by ``group_ids [S]`` and by nothing else: neither their order nor the size of the groups
    matters, so a group that lost samples is normalised over those it has. A group of one has advantage 0. The sums
    are taken in float64 and from the smallest reward of each group on, so that equal rewards give exactly 0.
    """
    groups, sizes = _groups(group_ids)
    centred = _centred(rewards, groups, sizes)
    if normalize_std:
        variance = groups.sums(centred.square()) / (sizes - 1).clamp(min=1)
        centred = centred / groups.spread(variance.sqrt() + STD_EPSILON)
    return centred.to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages ``[S]``: each reward less the mean of the *others* of its group.

    ``A_i = r_i − Σ_{j≠i} r_j / (n − 1)``: RLOO, Ahmadian et al., arXiv 2402.14740. It equals ``n / (n − 1)`` times
    the reward less the mean of the whole group. A group of one has nothing to compare with: advantage 0.
    """
    groups, sizes = _groups(group_ids)
    centred = _centred(rewards, groups, sizes)
    return (centred * groups.spread(sizes / (sizes - 1).clamp(min=1))).to(rewards.dtype)


def mean_normalized_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages ``[S]``: each reward less the mean of its group, over that mean; 0 in a group that has earned nothing.

    ``A = (r − mean) / mean``: MaxRL, Tajwar et al., arXiv 2602.02710, algorithm 1. With rewards of 0 and 1 and n
    samples the expected gradient is that of ``log p`` to order n − 1 in the share ``1 − p`` of wrong answers.

    Args:
        rewards: at least 0 ``[S]``.
        group_ids: samples with the same one belong together ``[S]``.

    Raises:
        UserFault: a reward is negative: the logarithm of an expected reward is maximised, which has none then.
    """
    if (rewards < 0).any():
        raise UserFault(
            f"estimator: maxrl divides by the mean reward of a group, so no reward may be negative; found "
            f"{float(rewards.min()):g}. Shift what reward.function returns, or set learner.objective.estimator: grpo"
        )
    groups, sizes = _groups(group_ids)
    centred = _centred(rewards, groups, sizes)
    means = groups.sums(rewards.double()) / sizes
    return (centred / groups.spread(means.masked_fill(means == 0.0, 1.0))).to(rewards.dtype)


def decoupled_advantages(
    components: Tensor, weights: Tensor, group_ids: Tensor, is_trained: Tensor, *, normalize_std: bool
) -> Tensor:
    """Advantages ``[S]`` of rewards that are sums: every component is normalised within its group, their weighted sum
    within the batch.

    GDPO, Liu et al., arXiv 2601.05242: ``A = Σ_k w_k · (r_k − mean) / (std + 1e-6)`` over each group, and then
    ``(A − mean) / (std + 1e-6)`` over the samples of the batch, with unbiased standard deviations.

    Args:
        components: ``r_k`` ``[S, K]``.
        weights: ``w_k`` ``[K]``.
        group_ids: samples with the same one belong together ``[S]``.
        is_trained: bool ``[S]``; samples without a trained token count in their group and not in the batch.
        normalize_std: whether components are divided by their standard deviation within the group.
    """
    normalized = [
        group_normalized_advantages(component, group_ids, normalize_std=normalize_std)
        for component in components.unbind(dim=1)
    ]
    total = torch.stack(normalized, dim=1) @ weights
    counted = total[is_trained]
    if len(counted) < 2:
        return torch.zeros_like(total)
    return (total - counted.mean()) / (counted.std() + STD_EPSILON)


def reinforce_plus_plus_baseline_advantages(
    centred_rewards: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """``A_t = (R − group mean) − kl_coef · kl_t`` per trained position ``[S, T]``, 0 elsewhere.

    REINFORCE++-baseline, arXiv 2501.03262; to be whitened over the batch afterwards.

    Args:
        centred_rewards: ``R`` less the mean of its group ``[S]``.
        mask: 1 where a position is trained ``[S, T]``.
        kl: estimate per position ``[S, T]``.
        kl_coef: its weight.
    """
    advantages = centred_rewards[:, None] if kl is None else centred_rewards[:, None] - kl_coef * kl
    return advantages * mask


def generalized_token_advantages(
    token_rewards: Tensor, values: Tensor, sizes: Tensor, *, discount: float, trace: float | Tensor
) -> Tensor:
    """GAE: ``δ_t = r_t + γ V_{t+1} − V_t`` and ``A_t = Σ_l (γλ)^l δ_{t+l}``, with ``V = 0`` after the last position.

    Schulman et al., arXiv 1506.02438. Of trained tokens alone, laid end to end sample by sample, in the order of their
    positions: those that are not trained are no actions, and are stepped over.

    Args:
        token_rewards: ``[N]``.
        values: of the critic, before the step ``[N]``.
        sizes: trained tokens of each sample, in order; adds up to N.
        discount: γ.
        trace: λ, or that of each sample ``[S]``.
    """
    goes_on = goes_on_after(sizes).to(token_rewards.dtype)
    errors = token_rewards + discount * goes_on * values.roll(-1) - values
    traces = trace.repeat_interleave(sizes) if isinstance(trace, torch.Tensor) else trace
    return reverse_recurrence(errors, discount * traces * goes_on, longest=int(sizes.max()))


def length_adaptive_trace(sizes: Tensor, *, alpha: float) -> Tensor:
    """λ of each sample ``[S]``: ``max(0, 1 − 1 / (α · l))`` with its trained tokens ``l``.

    VAPO, Yue et al., arXiv 2504.05118, equation 5. The paper has responses of thousands of tokens; below ``1 / α``
    tokens its λ would be negative, and is 0 here.

    Args:
        sizes: trained tokens of each sample ``[S]``.
        alpha: α, 0.05 in the paper.
    """
    return (1.0 - 1.0 / (alpha * sizes.double().clamp(min=1))).clamp(min=0.0)


def goes_on_after(sizes: Tensor) -> Tensor:
    """Of each token of samples that are laid end to end, whether another of its sample follows; bool ``[N]``.

    Args:
        sizes: tokens of each sample ``[S]``.
    """
    ends = sizes.cumsum(0)
    follows = torch.ones(int(ends[-1]), dtype=torch.bool, device=sizes.device)
    follows[ends[sizes > 0] - 1] = False
    return follows


def whitened(advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """``(A − μ) / √(σ² + 1e-8)`` with mean and unbiased variance over the trained tokens of the whole step.

    Args:
        advantages: of any shape.
        mask: of the same shape, 1 where a token counts for μ and σ; None: all count. Masked ones are transformed too.

    Raises:
        ValueError: no token counts.
    """
    counts = torch.ones_like(advantages) if mask is None else mask
    exact, weight = advantages.double(), (counts != 0).double()
    number = weight.sum()
    if number == 0:
        raise ValueError("advantages cannot be whitened: no token of the step is trained")
    above = exact - exact[weight > 0].min()  # equal ones are exactly 0 then
    centred = above - (above * weight).sum() / number
    variance = (centred.square() * weight).sum() / (number - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + WHITEN_EPSILON)).to(advantages.dtype)


def _centred(rewards: Tensor, groups: Segments, sizes: Tensor) -> Tensor:
    """Each reward less the mean of its group, float64 ``[S]``."""
    exact = rewards.double()
    smallest = exact.new_zeros(groups.count).scatter_reduce(0, groups.index, exact, "amin", include_self=False)
    above = exact - groups.spread(smallest)
    return above - groups.spread(groups.sums(above) / sizes)


def _groups(group_ids: Tensor) -> tuple[Segments, Tensor]:
    _, group_of, sizes = cast(
        "tuple[Tensor, Tensor, Tensor]", torch.unique(group_ids, return_inverse=True, return_counts=True)
    )
    return Segments(group_of, len(sizes)), sizes.double()
