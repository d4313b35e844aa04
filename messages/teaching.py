"""The events between Scorer and teachers: how likely a teacher finds the tokens of a sample.

Neither is kept by the runtime. The Scorer holds the sample and asks again; an answer follows from the tokens alone,
since a teacher's weights never change, so whichever comes first is as good as any other.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.messages.arrays import TOKEN_BYTES, ArrayLengthError
from penstock.messages.base import Delivery, Event, Value
from penstock.messages.samples import SampleKey
from penstock.messages.top_logprobs import TopLogprobs


class GivenTokens(Value, frozen=True, array_like=True):
    """Tokens whose log-probs are wanted, and what stands before them."""

    context: bytes
    """int32 ids ``[C]``, at least one."""
    tokens: bytes
    """int32 ids ``[T]``"""

    def __post_init__(self) -> None:
        for name, data in (("context", self.context), ("tokens", self.tokens)):
            if len(data) % TOKEN_BYTES:
                raise ArrayLengthError(f"{name}: expected a multiple of {TOKEN_BYTES} bytes, got {len(data)}")

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens) // TOKEN_BYTES


class TeacherAsked(Event, frozen=True, kw_only=True):
    """Scorer → teacher: how likely are these tokens?"""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    key: SampleKey
    attempt: int
    texts: tuple[GivenTokens, ...]
    """One for each part of the sample."""


class TeacherAnswered(Event, frozen=True, kw_only=True):
    """Teacher → Scorer: their log-probs, or why there are none."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    teacher: str
    key: SampleKey
    attempt: int
    logprobs: tuple[bytes, ...] = ()
    """float32 for each part, as many as it has tokens."""
    error: str = ""
    top: tuple[TopLogprobs, ...] = ()
    """For each part, where the teacher is to say it."""
