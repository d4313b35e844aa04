"""Log-probs and entropy from logits, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probs ``[N]`` of ``targets [N]`` under the distribution that ``logits [N, V]`` give at ``temperature``.

    ``temperature`` is the one the engine samples with, so that both sides speak of the same distribution.
    """
    return -functional.cross_entropy(_scaled(logits, temperature), targets, reduction="none")


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy ``[N]`` in nats of the distribution that ``logits [N, V]`` give at ``temperature``."""
    logprobs = functional.log_softmax(_scaled(logits, temperature), dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float()
    return scaled if temperature == 1.0 else scaled / temperature
