"""Log-probs and entropy from logits, in float32 or better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probs ``[N]`` of ``targets [N]`` under the distribution that ``logits [N, V]`` give at ``temperature``.

    ``log p(y) = z_y / τ − logsumexp(z / τ)``, and ``∂ log p(y) / ∂ z = (1[y] − p) / τ``.

    Args:
        logits: as the model gives them ``[N, V]``.
        targets: int64 ``[N]``.
        temperature: τ, the one that the engine samples with, so that both sides speak of the same distribution.
    """
    return -functional.cross_entropy(_scaled(logits, temperature), targets, reduction="none")


def kept_logprobs(
    target_logits: Tensor, kept_logits: Tensor, kept: Tensor, *, whole: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Log-probs ``[N]`` of the targets under the distribution that is left of each row when only some tokens are kept:
    ``log p(y) = z_y / τ − logsumexp_{v kept}(z_v / τ)``, with ``∂ log p(y) / ∂ z_v = (1[y = v] − p_v) / τ`` of those
    that are kept and 0 of the others.

    Args:
        target_logits: ``[N]``; each target is among those that are kept.
        kept_logits: ``[N, W]``, of any finite value where ``kept`` is −1.
        kept: ids ``[N, W]``, −1 behind them; a row of −1 alone keeps all of the vocabulary.
        whole: log-probs over all of it ``[N]``; None where there is no such row.
        temperature: τ.
    """
    is_kept, own = kept >= 0, _scaled(target_logits, temperature)
    logits = _scaled(kept_logits, temperature).masked_fill(~is_kept, float("-inf"))
    if whole is None:
        return own - logits.logsumexp(dim=1)
    has_set = is_kept.any(dim=1)
    # Nothing but −∞ would have gradients that are no numbers, even where nobody reads them.
    logits = logits.where(has_set[:, None], own.detach()[:, None])
    return (own - logits.logsumexp(dim=1)).where(has_set, whole)


def other_logprobs(logprobs: Tensor, logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probs ``[N, k]`` of tokens with ``logits [N, k]``, from those of the targets: ``log p(v) − log p(y)`` is
    ``(z_v − z_y) / τ``, whatever the other tokens are. −∞ where the logit is.

    Args:
        logprobs: of the targets ``[N]``.
        logits: of the others ``[N, k]``.
        target_logits: ``[N]``
        temperature: τ.
    """
    return logprobs[:, None] + _scaled(logits, temperature) - _scaled(target_logits, temperature)[:, None]


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy ``[N]`` in nats of the whole distribution that ``logits [N, V]`` give at ``temperature``:
    ``H = logsumexp(z) − Σ p · z``, and ``∂H / ∂z = p · (Σ p z − z)``."""
    logprobs = functional.log_softmax(_scaled(logits, temperature), dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = at_least_float32(logits)
    return scaled if temperature == 1.0 else scaled / temperature
