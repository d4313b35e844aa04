"""How a judge's answers are drawn: what the scenario says of each judge, and what a request asks for.

Invariant: a judge's options and the requests that it makes by them give the same sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from penstock.backends.engines.options import SamplingOptions
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backends.rewards.service_options import JudgeOptions

DRAWN_BY: Final = ("temperature", "top_p", "top_k", "min_p")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of the question."""

    role: str
    content: str


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. What is not among these is not served, and so refused."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str = ""
    """Whatever it says: there is one model."""
    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    stop: Annotated[str, Meta(min_length=1)] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None

    def sampling(self, max_context: int) -> SamplingOptions:
        """How its answer is drawn. The length limit of each request is its own."""
        stops = () if self.stop is None else (self.stop,)
        drawn_by = {name: getattr(self, name) for name in DRAWN_BY}
        return SamplingOptions(**drawn_by, stop=stops, max_response_tokens=max_context)


def question_of(judge: JudgeOptions) -> Question:
    """What this judge asks, with a text in place of the question.

    Raises:
        UserFault: an embedded engine does not serve what ``temperature`` or ``body`` ask for.
    """
    message = {"role": "user", "content": ""}
    asked = {**judge.body, "messages": [message], "temperature": judge.temperature, "max_tokens": judge.max_tokens}
    try:
        return msgspec.convert(asked, Question)
    except msgspec.ValidationError as error:
        raise UserFault(str(error)) from None


def sampling_options_of(judges: Iterable[JudgeOptions], max_context: int) -> tuple[SamplingOptions, ...]:
    """The ways in which these judges' answers are drawn, each once.

    Raises:
        UserFault: see :func:`question_of`.
    """
    return tuple(dict.fromkeys(question_of(judge).sampling(max_context) for judge in judges))
