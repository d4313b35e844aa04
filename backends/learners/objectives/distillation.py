"""Learning from a teacher: a model of fixed weights that says how likely it finds the student's own tokens.

Teacher and student are compared at one temperature, that of the sampling, so that a student which is the teacher is at
a distance of 0 from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor


NEVER: Final = -1e4
"""Log-prob of what does not happen."""


def sampled_reverse_kl(old_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """``old_t − teacher_t`` for each token ``[N]``: its mean over tokens that ``old`` has sampled is the reverse KL
    divergence KL(old ‖ teacher), in nats a token. No gradient flows through it.
    """
    return old_logprobs.detach() - teacher_logprobs.detach()


def top_divergence(student_top: Tensor, teacher_top: Tensor, *, beta: float) -> Tensor:
    """The generalised Jensen–Shannon divergence between teacher and student, per token ``[N]`` in nats, over the
    teacher's likeliest tokens and one more, all others together: ``β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M)`` with
    ``M = β P + (1 − β) Q``, P the teacher, Q the student.

    GKD, Agarwal et al., arXiv 2306.13649. ``beta`` of 0 gives the forward KL(P ‖ Q) and 1 the reverse KL(Q ‖ P), the
    limits of the divergence over ``β`` and ``1 − β``. Both distributions are whole, so it is never negative, nor above
    the divergence over the vocabulary, which it is where the likeliest tokens are all there are.

    Args:
        student_top: log-probs of the student ``[N, k]``, with gradient; −∞ where it does not know the token, which is
            then one of the others.
        teacher_top: of the teacher ``[N, k]``; not finite likewise where it has named fewer. No gradient flows here.
        beta: from 0 to 1.
    """
    least = torch.finfo(student_top.dtype).eps
    # In float64: what is left of the probability is a difference of numbers near 1.
    student_top, teacher_top = student_top.double(), teacher_top.detach().double()
    is_known = student_top.isfinite() & teacher_top.isfinite()
    # e^NEVER is exactly 0, and unlike −∞ its differences are numbers.
    student, teacher = (_with_others(each.masked_fill(~is_known, NEVER), least) for each in (student_top, teacher_top))
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _with_others(logprobs: Tensor, least: float) -> Tensor:
    """One column more, for what is left of the probability, at least so much: what rounding leaves is no news."""
    named = logprobs.logsumexp(dim=-1, keepdim=True).clamp(max=-least)
    return torch.cat([logprobs, (-torch.expm1(named)).log()], dim=-1)


def _kl(logprobs: Tensor, base: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - base)).sum(dim=-1)
