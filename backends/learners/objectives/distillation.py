"""Learning from a teacher: a model of fixed weights that says how likely it finds the student's own tokens.

Teacher and student are compared at one temperature, that of the sampling, so that a student which is the teacher is at
a distance of 0 from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from penstock.backends.learners.objectives.logprobs import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


def sampled_reverse_kl(old_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """``old_t − teacher_t`` for each token ``[N]``: its mean over tokens that ``old`` has sampled is the reverse KL
    divergence KL(old ‖ teacher), in nats a token. No gradient flows through it.
    """
    return old_logprobs.detach() - teacher_logprobs.detach()


def distillation_advantages(
    advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, *, coef: float
) -> Tensor:
    """``A_t − coef · (old_t − teacher_t)`` for each token ``[N]``: on-policy distillation by the reverse KL of the
    sampled tokens.

    Agarwal et al., arXiv 2306.13649; Thinking Machines, "On-Policy Distillation". With advantages of 0 and coef 1 it
    is distillation alone. No gradient flows through it.
    """
    return advantages - coef * sampled_reverse_kl(old_logprobs, teacher_logprobs)


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
