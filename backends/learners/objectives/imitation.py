"""Learning from what is given: demonstrations, one's own best responses, a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from penstock.backends.learners.objectives.logprobs import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


def supervised_loss(logprobs: Tensor) -> Tensor:
    """``−log π(y_t)`` for each token ``[N]``: maximum likelihood. Its mean over the trained tokens is the SFT loss."""
    return -logprobs


def best_of_group(rewards: Tensor, group_ids: Tensor, *, threshold: float) -> Tensor:
    """True ``[S]`` for the samples that rejection sampling keeps: the best of each group, all of them where several
    are equally good, if their reward is at least ``threshold``.

    Rejection sampling fine-tuning, Touvron et al., arXiv 2307.09288 (§3.2.3), Yuan et al., arXiv 2308.01825.
    """
    same = group_ids[:, None] == group_ids[None, :]
    best = torch.where(same, rewards[None, :], float("-inf")).amax(dim=1)
    return (rewards == best) & (rewards >= threshold)


def distillation_advantages(
    advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, *, coef: float
) -> Tensor:
    """``A_t − coef · (old_t − teacher_t)`` for each token ``[N]``: on-policy distillation by the reverse KL of the
    sampled tokens.

    Agarwal et al., arXiv 2306.13649; Thinking Machines, "On-Policy Distillation". With advantages of 0 and coef 1 it
    is distillation alone. No gradient flows through it.
    """
    return advantages - coef * (old_logprobs.detach() - teacher_logprobs.detach())


def generalized_jsd(logits: Tensor, teacher_logits: Tensor, *, beta: float) -> Tensor:
    """The generalised Jensen–Shannon divergence between teacher and student over the whole vocabulary, per token
    ``[N]`` in nats: ``β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M)`` with ``M = β P + (1 − β) Q``, P the teacher, Q the student.

    GKD, Agarwal et al., arXiv 2306.13649. ``beta`` of 0 gives the forward KL(P ‖ Q) and 1 the reverse KL(Q ‖ P), the
    limits of the divergence over ``β`` and ``1 − β``.

    Args:
        logits: of the student ``[N, V]``; with gradient.
        teacher_logits: ``[N, V]``; no gradient flows here.
        beta: from 0 to 1.
    """
    student = functional.log_softmax(at_least_float32(logits), dim=-1)
    teacher = functional.log_softmax(at_least_float32(teacher_logits.detach()), dim=-1)
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    weights = torch.tensor([beta, 1.0 - beta], dtype=student.dtype, device=student.device).log()
    mixture = torch.logsumexp(torch.stack([teacher + weights[0], student + weights[1]]), dim=0)
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _kl(logprobs: Tensor, base: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - base)).sum(dim=-1)
