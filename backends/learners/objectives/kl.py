"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens.

John Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html. With ``d = logprobs − base_logprobs``
per token:

| name | value | as a value | as a loss |
|---|---|---|---|
| ``k1`` | ``d`` | unbiased | on-policy gradient 0 in expectation: of no use |
| ``k2`` | ``d² / 2`` | biased | its on-policy gradient is that of the reverse KL |
| ``k3`` | ``exp(−d) − 1 + d`` | unbiased, never negative | gradient of the forward KL, on policy |
| ``low_var_kl`` | ``clamp(k3, −10, 10)`` | as k3 | no gradient where the clamp holds, from d ≈ −2.6 on |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

import torch

from penstock.backends.learners.objectives.logprobs import at_least_float32
from penstock.backends.learners.objectives.policy_loss import MAX_LOG_RATIO, probability_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.objective_names import KlEstimator

LOW_VAR_BOUND: Final = 10.0


def k1_kl(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``d`` per token ``[N]``: unbiased as a value of KL(policy ‖ base) where the tokens are the policy's."""
    return at_least_float32(logprobs) - at_least_float32(base_logprobs)


def k2_kl(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``d² / 2`` per token ``[N]``."""
    return k1_kl(logprobs, base_logprobs).square() / 2


def k3_kl(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``exp(−d) − 1 + d`` per token ``[N]``: never negative, and unbiased as a value of KL(policy ‖ base) where the
    tokens are the policy's. Its ``d`` is held within ±20, as ``exp`` must not overflow."""
    difference = k1_kl(logprobs, base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-difference) + difference


def squared_log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """``(logprobs − behaviour_logprobs)²`` per token ``[N]``, twice :func:`k2_kl`: how Kimi K2.5, arXiv 2602.02276,
    equation 1, holds the policy to the one that drew the tokens. Unlike a bound on the ratio it pulls a token back
    whichever way it went and whatever its advantage is."""
    return k1_kl(logprobs, behaviour_logprobs).square()


def kl_estimate(
    estimator: KlEstimator, logprobs: Tensor, base_logprobs: Tensor, *, behaviour_logprobs: Tensor | None = None
) -> Tensor:
    """The named estimator per token ``[N]``.

    Args:
        estimator: see the table of this module.
        logprobs: of the policy ``[N]``; the gradient flows through it.
        base_logprobs: of the policy that it is compared with ``[N]``.
        behaviour_logprobs: of the policy that the tokens are drawn from ``[N]``; where given, the estimate is
            multiplied by ``exp(logprobs − behaviour_logprobs)``, through which the gradient flows too, before the
            clamp of ``low_var_kl``. That makes value and gradient unbiased off policy (DeepSeek-V3.2,
            arXiv 2512.02556, "unbiased KL estimate").
    """
    match estimator:
        case "k1":
            value = k1_kl(logprobs, base_logprobs)
        case "k2":
            value = k2_kl(logprobs, base_logprobs)
        case "k3" | "low_var_kl":
            value = k3_kl(logprobs, base_logprobs)
        case _:
            assert_never(estimator)
    if behaviour_logprobs is not None:
        value = probability_ratio(logprobs, behaviour_logprobs) * value
    return value.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if estimator == "low_var_kl" else value
