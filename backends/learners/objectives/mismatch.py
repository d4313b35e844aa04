"""How far the learner's log-probs are from the engine's on the same tokens, as figures; nothing here has a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.objectives.policy_loss import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.objectives.segments import Segments


def engine_mismatch(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Per token ``[N]``, in nats: the absolute difference, and the k1 estimate of KL(engine ‖ learner), which is
    unbiased as the tokens are the engine's."""
    difference = logprobs.detach() - rollout_logprobs
    return {
        "train/train_rollout_logprob_abs_diff": difference.abs(),
        "train/train_rollout_kl": -difference,
    }


def mis_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, sequences: Segments) -> dict[str, Tensor]:
    """The metrics of MIS per token ``[N]``; what belongs to a sequence has the same value at each of its tokens.

    With ``d = old − rollout``: ``kl = −d``, ``k3_kl = e^d − d − 1``, ``log_ppl = −mean log-prob``,
    ``log_ppl_diff = mean rollout − mean old``, ``ppl_ratio = e^{log_ppl_diff}``, ``chi2_token = mean(e^{2d}) − 1`` and
    ``chi2_seq = e^{2 Σ d} − 1``, with exponents held within ±20 before they are doubled.
    """
    old = old_logprobs.detach()
    difference = old - rollout_logprobs
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training, rollout = (-sequences.spread(sequences.means(values)) for values in (old, rollout_logprobs))
    apart = training - rollout
    chi2_token = sequences.spread(sequences.means((2 * bounded).exp())) - 1.0
    total = sequences.spread(sequences.sums(difference)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "train/mis_kl": -difference,
        "train/mis_k3_kl": torch.expm1(bounded) - bounded,
        "train/mis_training_log_ppl": training,
        "train/mis_training_ppl": training.exp(),
        "train/mis_rollout_log_ppl": rollout,
        "train/mis_rollout_ppl": rollout.exp(),
        "train/mis_log_ppl_diff": apart,
        "train/mis_log_ppl_abs_diff": apart.abs(),
        "train/mis_ppl_ratio": apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        "train/mis_chi2_token": chi2_token,
        "train/mis_chi2_seq": (2 * total).exp() - 1.0,
    }
