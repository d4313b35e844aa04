"""What the engine is asked for, what it keeps of a running request, and what it answers.

Positions are indices into the context: the prompt's tokens first, the response's after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import ArrayLengthError, tokens_view
from penstock.messages.parts import spans_between
from penstock.messages.samples import Media, Part, VersionSpan
from penstock.messages.texts import counted, does

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from penstock.backends.engines.torch.sampling import Sampler
    from penstock.backends.engines.torch.sight import Sight
    from penstock.backends.engines.torch.stopping import EndReason, StopStringWatch

MAX_SCORED_ROWS: Final = 512
"""Rows of logits that ``score`` holds at once; so many tokens can be scored whatever ``max_context`` is, if the model
allows them: a canary may be longer than the responses."""


class RequestError(Exception):
    """A request that cannot be served, for this reason; the others are not touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response wanted."""

    tag: Hashable
    """Names the request in every answer; unique among those that have not ended."""
    prompt: bytes
    """int32 ids ``[P]``, P ≥ 1."""
    seed: int
    """Of the sample; token ``t`` of the response draws number ``t`` of its stream."""
    max_new_tokens: int
    """Length limit of the response, prefix included."""
    sampling_index: int = 0
    """Which of the engine's sampling parameters it is drawn with."""
    sampler: Sampler | None = None
    """In place of theirs; what ends the response is as they say."""
    media: tuple[Media, ...] = ()
    """Images that stand in the prompt, in their order."""
    prefix: Part = field(default_factory=Part)
    """Tokens of the response that are there already; generation goes on after them."""

    @property
    def prompt_key(self) -> bytes:
        """The same for requests whose prompts have the same keys and values: the same tokens and images."""
        return b"".join((self.prompt, *(f"{each.at}{each.digest}".encode() for each in self.media)))


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over, with its whole response, prefix included."""

    tag: Hashable
    reason: EndReason
    part: Part


@dataclass(frozen=True, slots=True)
class Advanced:
    """Tokens of a running request since its last report."""

    tag: Hashable
    from_token: int
    """Index of the first of them in the response."""
    chunk: Part


@dataclass(frozen=True, slots=True)
class VersionMark:
    """From this new token on, ``version`` made them."""

    version: int
    from_token: int


@dataclass(slots=True, eq=False)
class Running:
    """A request in a slot."""

    request: GenerationRequest
    prompt_tokens: list[int]
    prefix_tokens: list[int]
    watch: StopStringWatch | None
    sight: Sight | None = None
    """The images of the prompt; None: it has none."""
    num_cached_tokens: int = 0
    """Of the prompt, tokens whose keys and values a slot held when it was admitted."""
    born: int = 0
    """Clock of the engine when it was admitted; it gains one token per tick from there."""
    offset: int = 0
    """Its position is the clock and so much more."""
    marks: list[VersionMark] = field(default_factory=list[VersionMark])
    num_reported: int = 0
    """New tokens (beyond the prefix) that were reported."""

    def begin(self, clock: int, version: int) -> None:
        """It is admitted; ``version`` makes its next token."""
        self.born, self.offset = clock, self.first_position - clock
        self.marks = [VersionMark(version, 0)]

    @property
    def shift(self) -> int:
        """What the rotary embedding adds to the place of a token after the prompt."""
        return 0 if self.sight is None else self.sight.placed.shift

    @property
    def last_token(self) -> int:
        """Of prompt and prefix: the token that it feeds first."""
        return (self.prefix_tokens or self.prompt_tokens)[-1]

    @property
    def first_position(self) -> int:
        """Position of the token that it feeds first."""
        return len(self.prompt_tokens) + len(self.prefix_tokens) - 1

    @property
    def last_position(self) -> int:
        """Position whose feeding draws the last token that the length limit allows."""
        return len(self.prompt_tokens) + self.request.max_new_tokens - 2

    def num_new(self, clock: int) -> int:
        """Tokens drawn since it was admitted."""
        return clock - self.born

    @property
    def num_unread_tokens(self) -> int:
        """Of prompt and prefix, those that no slot held when it was admitted: the one that it feeds first at least."""
        return self.first_position + 1 - self.num_cached_tokens

    def position_at(self, clock: int) -> int:
        """Position of the token that it feeds next; so many positions are in the cache."""
        return self.offset + clock

    def mark_version(self, version: int, clock: int) -> None:
        """Tokens from here on are made by ``version``."""
        if self.marks[-1].from_token == self.num_new(clock):
            self.marks.pop()
        if not self.marks or self.marks[-1].version != version:
            self.marks.append(VersionMark(version, self.num_new(clock)))


def new_spans(marks: Sequence[VersionMark], begin: int, end: int) -> tuple[VersionSpan, ...]:
    """Which version made the new tokens ``begin`` … ``end − 1``."""
    ends = [mark.from_token for mark in marks[1:]] + [max(end, marks[-1].from_token)]
    spans = (VersionSpan(mark.version, stop - mark.from_token) for mark, stop in zip(marks, ends, strict=True))
    return spans_between(spans, begin, end)


@dataclass(frozen=True, slots=True)
class Tick:
    """What one step of the engine brought about."""

    ended: list[Ended]
    advanced: list[Advanced]
    num_decoded: int = 0
    """Requests that it drew a token for."""
    num_context_tokens: int = 0
    """That they held together when it was drawn."""
    num_read_tokens: int = 0
    """Of the contexts that were admitted, those that were in no cache; 0: nobody was."""


def check_may_sleep(num_open: int) -> None:
    """Raise unless an engine with so many requests that run or wait may give its memory up.

    Raises:
        RuntimeError: there are some.
    """
    if num_open:
        what = f"{counted(num_open, 'request')} {does(num_open, 'are')} open"
        raise RuntimeError(f"the engine was to sleep while {what}")


def check_scored(ids: Sequence[int], *, vocab_size: int, max_tokens: int, has_weights: bool) -> None:
    """Raise unless an engine can say the log-probs of these tokens.

    Raises:
        RequestError: no weights were loaded yet, or the tokens do not fit the model.
    """
    if not has_weights:
        raise RequestError("no weights were loaded yet")
    if len(ids) > max_tokens or any(not 0 <= token < vocab_size for token in ids):
        raise RequestError(
            f"tokens to score must be ids below {vocab_size}, at most {max_tokens} of them, got {len(ids)}"
        )


def checked_tokens(data: bytes, what: str, vocab_size: int) -> list[int]:
    """The token ids in ``data``.

    Raises:
        RequestError: one is outside the vocabulary, or the bytes are no token ids.
    """
    try:
        tokens = tokens_view(data).tolist()
    except ArrayLengthError as error:
        raise RequestError(f"the {what}: {error}") from error
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        place, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab_size)
        raise RequestError(
            f"token {place} of the {what} has id {token}, outside the model's vocabulary of {vocab_size};"
            " use the tokenizer of the model"
        )
    return tokens
