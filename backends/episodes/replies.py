"""Turns as responses of the OpenAI protocol, whole or as a stream."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Final

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
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.episodes.turns import TurnReply, TurnRun

CHAT: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"
TEXT: Final = "text_completion"


class EpisodeEndedError(Exception):
    """The episode was taken away while the turn ran."""


class Replies:
    """The responses to one request."""

    error_event: ClassVar[str] = ""
    """Name of the event in which a stream says what went wrong."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        runs: Sequence[TurnRun],
        *,
        session: str,
        model: str,
        ignored: list[str],
    ) -> None:
        self._request = request
        self._run, self._runs = runs[0], runs
        self._session = session
        self._model = model
        self._ignored = ignored
        self._created = int(time.time())

    async def whole(self) -> Response:
        """The response in one piece.

        Raises:
            EpisodeEndedError: there is none.
        """
        replies = [await self._over(run) for run in self._runs]
        asked, made = replies[0].usage.prompt_tokens, sum(reply.usage.completion_tokens for reply in replies)
        usage = Usage(asked, made, asked + made)
        if isinstance(self._request, CompletionRequest):
            texts = [self._text_choice(reply, reply.text, index) for index, reply in enumerate(replies)]
            return self._frame(TEXT, texts, replies[0], usage=usage)
        choices = [
            ChatChoice(
                ReplyMessage(reply.content, list(reply.calls) or msgspec.UNSET),
                reply.finish_reason,
                self._chat_logprobs(reply),
                index,
            )
            for index, reply in enumerate(replies)
        ]
        return self._frame(CHAT, choices, replies[0], usage=usage)

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
        reply = await self._over(self._run)
        if is_chat:
            if len(reply.text) > len(sent):
                yield self._piece(reply.text[len(sent) :])
            if reply.calls:
                calls = [ToolCallDelta(i, call.id, call.function) for i, call in enumerate(reply.calls)]
                yield self._frame(CHUNK, [ChunkChoice(Delta(tool_calls=calls))])
            last = ChunkChoice(Delta(), reply.finish_reason, self._chat_logprobs(reply))
            yield self._frame(CHUNK, [last], reply)
        else:
            yield self._frame(TEXT, [self._text_choice(reply, reply.text[len(sent) :])], reply)
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield self._frame(CHUNK if is_chat else TEXT, [], reply, usage=reply.usage)

    async def events(self) -> AsyncIterator[bytes]:
        """:meth:`stream` as server-sent events, with the last one that the protocol has."""
        async for piece in self.stream():
            yield event_of(piece)
        yield b"data: [DONE]\n\n"

    async def _over(self, run: TurnRun) -> TurnReply:
        reply = await run.over()
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
        usage: Usage | None = None,
    ) -> Response:
        fields = None
        if reply is not None:
            fields = penstock_fields(self._session, self._run, reply, self._ignored)
        prefix = "cmpl" if kind == TEXT else "chatcmpl"
        return Response(
            id=f"{prefix}-{self._session}-{self._run.number}",
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            penstock=fields if fields is not None else msgspec.UNSET,
        )

    def _chat_logprobs(self, reply: TurnReply) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        texts = token_texts(reply.ids, self._run.wording.tokenizer)
        return ChatLogprobs(
            [TokenLogprob(text, value, list(text.encode())) for text, value in zip(texts, reply.logprobs, strict=True)]
        )

    def _text_choice(self, reply: TurnReply, text: str, index: int = 0) -> CompletionChoice:
        logprobs = None
        if self._request.logprobs is not None:
            texts = token_texts(reply.ids, self._run.wording.tokenizer)
            offsets = list(accumulate(map(len, texts), initial=0))[:-1]
            logprobs = CompletionLogprobs(texts, reply.logprobs, offsets)
        return CompletionChoice(text, reply.finish_reason, logprobs, index)


def event_of(data: object, name: str = "") -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def penstock_fields(session: str, run: TurnRun, reply: TurnReply, ignored: list[str]) -> PenstockFields:
    """What the response says of this turn beyond the protocol."""
    return PenstockFields(session, run.number, list(reply.versions), ignored, run.conversation, run.masked)


def token_texts(ids: list[int], tokenizer: TextTokenizer) -> list[str]:
    """The text of each token as far as it has one of its own; a special token's is its name."""
    return [tokenizer.decode([token]) or tokenizer.token_text(token) for token in ids]
