"""Turns as responses of the OpenAI protocol, whole or as a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.episodes.api import (
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    PenstockFields,
    ReplyMessage,
    Response,
    TokenLogprob,
    ToolCallDelta,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.episodes.turns import TurnReply, TurnRun

CHAT: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"
TEXT: Final = "text_completion"


class EpisodeEndedError(Exception):
    """The episode was taken away while the turn ran."""


class Replies:
    """The responses to one request."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, run: TurnRun, *, session: str, model: str, ignored: list[str]
    ) -> None:
        self._request = request
        self._run = run
        self._session = session
        self._model = model
        self._ignored = ignored
        self._created = int(time.time())

    async def whole(self) -> Response:
        """The response in one piece.

        Raises:
            EpisodeEndedError: there is none.
        """
        reply = await self._over()
        if isinstance(self._request, CompletionRequest):
            return self._frame(TEXT, [self._text_choice(reply, reply.text)], reply)
        message = ReplyMessage(reply.content, list(reply.calls) or msgspec.UNSET)
        return self._frame(CHAT, [ChatChoice(message, reply.finish_reason, self._chat_logprobs(reply))], reply)

    async def stream(self) -> AsyncIterator[Response]:
        """The response in pieces, as the tokens come.

        Raises:
            EpisodeEndedError: the rest of it will not come.
        """
        is_chat, sent = isinstance(self._request, ChatRequest), ""
        if is_chat:
            yield self._frame(CHUNK, [ChunkChoice(Delta(role="assistant", content=""))])
        while not self._run.is_over:
            text = self._run.wording.settled(self._run.ids)
            if len(text) > len(sent):
                yield self._piece(text[len(sent) :])
                sent = text
            await self._run.changed()
        reply = await self._over()
        if is_chat:
            if len(reply.text) > len(sent):
                yield self._piece(reply.text[len(sent) :])
            if reply.calls:
                calls = [ToolCallDelta(i, call.id, call.function) for i, call in enumerate(reply.calls)]
                yield self._frame(CHUNK, [ChunkChoice(Delta(tool_calls=calls))])
            last = ChunkChoice(Delta(), reply.finish_reason, self._chat_logprobs(reply))
            yield self._frame(CHUNK, [last], reply, has_usage=False)
        else:
            yield self._frame(TEXT, [self._text_choice(reply, reply.text[len(sent) :])], reply, has_usage=False)
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield self._frame(CHUNK if is_chat else TEXT, [], reply)

    async def _over(self) -> TurnReply:
        reply = await self._run.over()
        if reply is None:
            raise EpisodeEndedError
        return reply

    def _piece(self, text: str) -> Response:
        if isinstance(self._request, ChatRequest):
            return self._frame(CHUNK, [ChunkChoice(Delta(content=text))])
        return self._frame(TEXT, [CompletionChoice(text, None)])

    def _frame(
        self,
        kind: str,
        choices: list[ChatChoice] | list[ChunkChoice] | list[CompletionChoice],
        reply: TurnReply | None = None,
        *,
        has_usage: bool = True,
    ) -> Response:
        fields = None
        if reply is not None:
            fields = PenstockFields(self._session, self._run.number, list(reply.versions), self._ignored)
        prefix = "cmpl" if kind == TEXT else "chatcmpl"
        return Response(
            id=f"{prefix}-{self._session}-{self._run.number}",
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=reply.usage if reply is not None and has_usage else None,
            penstock=fields if fields is not None else msgspec.UNSET,
        )

    def _chat_logprobs(self, reply: TurnReply) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        texts = token_texts(reply.ids, self._run.wording.tokenizer)
        return ChatLogprobs(
            [TokenLogprob(text, value, list(text.encode())) for text, value in zip(texts, reply.logprobs, strict=True)]
        )

    def _text_choice(self, reply: TurnReply, text: str) -> CompletionChoice:
        logprobs = None
        if self._request.logprobs is not None:
            texts = token_texts(reply.ids, self._run.wording.tokenizer)
            offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
            logprobs = CompletionLogprobs(texts, reply.logprobs, offsets)
        return CompletionChoice(text, reply.finish_reason, logprobs)


def token_texts(ids: list[int], tokenizer: TextTokenizer) -> list[str]:
    """The text of each token as far as it has one of its own; a special token's is its name."""
    return [tokenizer.decode([token]) or tokenizer.token_text(token) for token in ids]
