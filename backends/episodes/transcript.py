"""The tokens of one episode, as the model saw and made them.

Invariants:

* What is here was made by an engine or put in by the episode, in this order; nothing is tokenised twice.
* A token of the model has its log-prob, its version and loss mask 1. Any other has log-prob 0, loss mask 0, and the
  version of the token before it: it is never trained, and so no version appears that none of the model's tokens has.
* The first token is the model's: what stands before it is the context.
* Images stand in the context and among tokens that the model did not make; each is kept with its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES
from penstock.messages.kept_tokens import joined_kept
from penstock.messages.parts import add_span, spans_between
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from penstock.messages.engine_counts import EngineCounts
    from penstock.messages.kept_tokens import KeptTokens
    from penstock.messages.samples import Media, Prompt


class Transcript:
    """The growing response of one episode."""

    def __init__(self, prompt: Prompt) -> None:
        """``prompt``: of the sample."""
        self._prompt = (prompt.tokens, prompt.media)
        self._context = prompt.tokens
        self.media = prompt.media
        """All images, counted from the beginning of the context."""
        self._tokens = bytearray()
        self._logprobs = bytearray()
        self._mask = bytearray()
        self._spans: list[VersionSpan] = []
        self._kept: list[tuple[KeptTokens | None, int]] = []
        self.counts: EngineCounts | None = None
        """What the engine counted of the turns that have ended."""

    @property
    def num_tokens(self) -> int:
        """Of the response: everything after the context."""
        return len(self._mask)

    @property
    def num_model_tokens(self) -> int:
        return self._mask.count(1)

    @property
    def context(self) -> bytes:
        """int32 ids that stand before the response."""
        return self._context

    def so_far(self) -> bytes:
        """int32 ids of context and response."""
        return self._context + bytes(self._tokens)

    def begin_with(self, context: bytes, media: tuple[Media, ...] = ()) -> None:
        """The conversation begins with these int32 ids and their images, which may be others than the prompt's."""
        assert not self._mask, "the context cannot change under the tokens that were made after it"
        self._context, self.media = context, media

    def add_foreign(self, tokens: bytes, media: tuple[Media, ...] = ()) -> None:
        """Tokens that the model did not make; ``media``: images that stand there, counted from the first of them."""
        begin = len(self._context) // TOKEN_BYTES + self.num_tokens
        self.media += tuple(each.moved(begin) for each in media)
        if not self._mask:
            self._context += tokens
            return
        num_tokens = len(tokens) // TOKEN_BYTES
        self._tokens += tokens
        self._logprobs += bytes(num_tokens * LOGPROB_BYTES)
        self._mask += bytes(num_tokens)
        self._kept.append((None, num_tokens))
        add_span(self._spans, VersionSpan(self._spans[-1].version, num_tokens))

    def add_model(self, part: Part, *, is_trained: bool = True) -> None:
        """Tokens that the model made."""
        self._tokens += part.tokens
        self._logprobs += part.logprobs
        self._mask += (b"\1" if is_trained else b"\0") * part.num_tokens
        self._kept.append((part.kept, part.num_tokens))
        for span in part.spans:
            add_span(self._spans, span)

    def add_known(self, part: Part) -> None:
        """What another engine has told of: tokens of the model and of others."""
        begin = len(self._context) // TOKEN_BYTES + self.num_tokens
        self.media += tuple(each.moved(begin) for each in part.media if each.at >= 0)
        self._tokens += part.tokens
        self._logprobs += part.logprobs
        self._mask += part.loss_mask or b"\1" * part.num_tokens
        self._kept.append((part.kept, part.num_tokens))
        for span in part.spans:
            add_span(self._spans, span)

    def goes_on_with(self, choice: Transcript) -> bool:
        """Take over what was said after these very tokens; False where there are others by now."""
        before, context = self.so_far() if self._mask else b"", choice.context
        if not context.startswith(before):
            return False
        num_before, num_context = len(before) // TOKEN_BYTES, len(context) // TOKEN_BYTES
        new = tuple(each.moved(-num_before) for each in choice.media if num_before <= each.at < num_context)
        if self._mask:
            self.add_foreign(context[len(before) :], new)
        else:
            self.begin_with(context, new)
        self.add_known(choice.slice(0))
        return True

    def mask_from(self, begin: int) -> None:
        """Nothing from this token on is trained."""
        self._mask[begin:] = bytes(len(self._mask) - begin)

    def slice(self, begin: int, end: int | None = None) -> Part:
        """A stretch of the response; one that begins at 0 names the context where it is not the prompt."""
        stop = self.num_tokens if end is None else end
        mask = bytes(self._mask[begin:stop])
        num_context = len(self._context) // TOKEN_BYTES
        seen = tuple(each for each in self.media if each.at < num_context)
        is_own = begin == 0 and (self._context, seen) != self._prompt
        kept = joined_kept(self._kept)
        later = (each for each in self.media[len(seen) :] if begin <= each.at - num_context < stop)
        return Part(
            tokens=bytes(self._tokens[begin * TOKEN_BYTES : stop * TOKEN_BYTES]),
            logprobs=bytes(self._logprobs[begin * LOGPROB_BYTES : stop * LOGPROB_BYTES]),
            spans=spans_between(self._spans, begin, stop),
            loss_mask=mask if 0 in mask else b"",
            context_tokens=self._context if is_own else b"",
            media=tuple(each.moved(-num_context - begin) for each in (*(seen if is_own else ()), *later)),
            kept=None if kept is None else kept.between(begin, stop),
        )

    def whole(self) -> Part:
        """The response as one part."""
        return replace(self.slice(0), counts=self.counts)
