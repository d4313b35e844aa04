"""What a model finds likeliest in the place of each of some tokens."""

from __future__ import annotations

from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES, ArrayLengthError
from penstock.messages.base import Value


class TopLogprobs(Value, frozen=True, array_like=True):
    """The likeliest tokens of each of T places; the token that stands there is among them or not."""

    per_token: int
    """k."""
    ids: bytes
    """int32 ``[T, k]``"""
    logprobs: bytes
    """float32 ``[T, k]``"""

    def __post_init__(self) -> None:
        k, sizes = self.per_token, (len(self.ids), len(self.logprobs))
        if k < 1 or sizes[0] % (k * TOKEN_BYTES) or sizes[0] // TOKEN_BYTES * LOGPROB_BYTES != sizes[1]:
            raise ArrayLengthError(
                f"likeliest tokens: expected {k} a place, got {sizes[0]} bytes of ids, {sizes[1]} of log-probs"
            )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids) // (TOKEN_BYTES * self.per_token)
