"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens.

John Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def k3_kl(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``exp(−d) − 1 + d`` with ``d = logprobs − base_logprobs``, per token ``[N]``: never negative, and unbiased as a
    value of KL(policy ‖ base) where the tokens are the policy's."""
    difference = logprobs.float() - base_logprobs.float()
    return torch.expm1(-difference) + difference
