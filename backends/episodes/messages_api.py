"""Anthropic's Messages protocol, as far as the gateway serves it: requests become those of chat, and turns go out in
its form.

Invariants:

* A request is the chat request that says the same, so a session's tokens, log-probs and limits do not depend on the
  protocol that its agent speaks; what is refused there is refused here.
* What an answer says, sent back as it is, is the message that the next request has to repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec

from penstock.backends.episodes.api import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    ImageAddress,
    JsonObject,
    PenstockFields,
    SamplingFields,
    ToolCall,
)
from penstock.backends.episodes.dialogue import MalformedError
from penstock.backends.episodes.replies import EpisodeEndedError, event_of, penstock_fields
from penstock.backends.processes.http_server import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from penstock.backends.episodes.turns import TurnReply, TurnRun

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_REASONS: Final[dict[str, StopReason]] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class Source(msgspec.Struct, omit_defaults=True):
    """Of an image."""

    type: str = ""
    media_type: str = ""
    data: str = ""


class Block(msgspec.Struct, omit_defaults=True):
    """A piece of a message, of any kind; of each kind only its own fields are read."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: JsonObject = {}
    tool_use_id: str = ""
    content: str | list[Block] = ""
    source: Source | None = None


class InMessage(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    name: str
    input_schema: JsonObject = {}
    description: str = ""
    type: str | None = None


class Choice(msgspec.Struct):
    type: str


class Metadata(msgspec.Struct):
    user_id: str | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """``POST …/v1/messages``."""

    messages: list[InMessage]
    max_tokens: int
    model: str = ""
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Choice | None = None
    metadata: Metadata | None = None


class TurnUsage(msgspec.Struct, frozen=True):
    """Tokens of a turn."""

    input_tokens: int
    output_tokens: int


class OutMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    id: str
    model: str
    content: list[JsonObject]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: TurnUsage
    type: str = "message"
    role: str = "assistant"
    penstock: PenstockFields | msgspec.UnsetType = msgspec.UNSET


def as_chat(asked: MessagesRequest) -> ChatRequest:
    """The request of chat that says the same.

    Raises:
        RequestError: it asks for something that is not served.
        MalformedError: a message is not of the protocol.
    """
    _check_served(asked)
    messages: list[ChatMessage] = []
    if asked.system:
        messages.append(ChatMessage("system", _text(asked.system, "system")))
    for place, message in enumerate(asked.messages):
        messages += _chat_messages(message, f"messages[{place}].content")
    tools: list[JsonObject] = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in asked.tools or ()
    ]
    return ChatRequest(
        messages=messages,
        model=asked.model,
        max_tokens=asked.max_tokens,
        stop=asked.stop_sequences,
        stream=asked.stream,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        tools=tools or None,
        tool_choice=None if asked.tool_choice is None else asked.tool_choice.type,
    )


def _check_served(asked: MessagesRequest) -> None:
    problem = ""
    if asked.thinking is not None and asked.thinking.type != "disabled":
        problem = f"thinking: the policy writes its thoughts as text, if it has any; found {asked.thinking.type}"
    elif asked.tool_choice is not None and asked.tool_choice.type not in ("auto", "none"):
        problem = f"tool_choice: auto and none are served, as the policy decides; found {asked.tool_choice.type}"
    elif others := [tool.name for tool in asked.tools or () if tool.type not in (None, "custom")]:
        problem = f"tools: the server runs none itself; found {others[0]}"
    if problem:
        raise RequestError(400, "not_served", problem)


def _chat_messages(message: InMessage, place: str) -> list[ChatMessage]:
    """Results of tools are messages of their own there, before what the user says."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    served = ("text", "tool_use") if message.role == "assistant" else ("text", "image", "tool_result")
    if others := [block.type for block in message.content if block.type not in served]:
        raise MalformedError(
            f"{place}: {others[0]!r} is not served for role {message.role}; {' and '.join(served)} are"
        )
    texts = [block for block in message.content if block.type in ("text", "image")]
    if message.role == "user":
        results = [
            ChatMessage("tool", _shown(block.content, f"{place}, tool_result"), tool_call_id=block.tool_use_id)
            for block in message.content
            if block.type == "tool_result"
        ]
        return [*results, *([ChatMessage("user", _shown(texts, place))] if texts or not results else [])]
    calls = [
        ToolCall(block.id, FunctionCall(block.name, msgspec.json.encode(block.input).decode()))
        for block in message.content
        if block.type == "tool_use"
    ]
    return [ChatMessage("assistant", _text(texts, place) or (None if calls else ""), calls or None)]


def _shown(content: str | list[Block], place: str) -> str | list[ContentPart]:
    """A text, or its parts where there are images among them."""
    if isinstance(content, str) or all(block.type != "image" for block in content):
        return _text(content, place)
    return [_image(b, place) if b.type == "image" else ContentPart("text", _text([b], place)) for b in content]


def _image(block: Block, place: str) -> ContentPart:
    source = block.source
    if source is None or source.type != "base64":
        found = "none" if source is None else repr(source.type[:40])
        raise MalformedError(f"{place}: the source of an image: expected base64, as nothing is fetched; found {found}")
    return ContentPart("image_url", image_url=ImageAddress(f"data:{source.media_type};base64,{source.data}"))


def _text(content: str | list[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    if others := [block.type for block in content if block.type != "text"]:
        raise MalformedError(f"{place}: only text is served; found {others[0]!r}")
    return "".join(block.text for block in content)


class MessageReplies:
    """The response to one request; as :class:`~penstock.backends.episodes.replies.Replies`."""

    error_event: ClassVar[str] = "error"

    def __init__(
        self, asked: SamplingFields, runs: Sequence[TurnRun], *, session: str, model: str, ignored: list[str]
    ) -> None:
        self._asked, self._run, self._session, self._model, self._ignored = asked, runs[0], session, model, ignored

    async def whole(self) -> OutMessage:
        """In one piece.

        Raises:
            EpisodeEndedError: there is none.
        """
        reply = await self._over()
        text = reply.content or ""
        blocks: list[JsonObject] = [{"type": "text", "text": text}] if text else []
        return self._message([*blocks, *(_tool_use(call, with_input=True) for call in reply.calls)], reply)

    async def stream(self) -> AsyncIterator[JsonObject]:
        """In events, each with its ``type``, as the tokens come.

        Raises:
            EpisodeEndedError: the rest of it will not come.
        """
        yield {"type": "message_start", "message": self._message([], None)}
        sent, index = "", 0
        while not self._run.is_over:
            text = self._run.wording.settled(self._run.ids)
            if text.strip() and len(text) > len(sent):
                for event in _text_events(index, text[len(sent) :], is_first=not sent):
                    yield event
                sent = text
            await self._run.changed()
        reply = await self._over()
        if len(reply.text) > len(sent) and (sent or reply.content):
            for event in _text_events(index, reply.text[len(sent) :], is_first=not sent):
                yield event
            sent = reply.text
        if sent:
            yield {"type": "content_block_stop", "index": index}
            index += 1
        for number, call in enumerate(reply.calls, start=index):
            yield {"type": "content_block_start", "index": number, "content_block": _tool_use(call, with_input=False)}
            delta = {"type": "input_json_delta", "partial_json": call.function.arguments}
            yield {"type": "content_block_delta", "index": number, "delta": delta}
            yield {"type": "content_block_stop", "index": number}
        end = self._message([], reply)
        stopped = {"stop_reason": end.stop_reason, "stop_sequence": end.stop_sequence}
        yield {"type": "message_delta", "delta": stopped, "usage": end.usage, "penstock": end.penstock}
        yield {"type": "message_stop"}

    async def events(self) -> AsyncIterator[bytes]:
        """:meth:`stream` as server-sent events, each named by its type."""
        async for piece in self.stream():
            yield event_of(piece, str(piece["type"]))

    async def _over(self) -> TurnReply:
        reply = await self._run.over()
        if reply is None:
            raise EpisodeEndedError
        return reply

    def _message(self, content: list[JsonObject], reply: TurnReply | None) -> OutMessage:
        reason, sequence = (None, None) if reply is None else self._stopped(reply)
        fields = None
        if reply is not None:
            fields = penstock_fields(self._session, self._run, reply, self._ignored)
        return OutMessage(
            id=f"msg_{self._session}_{self._run.number}",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=TurnUsage(self._run.num_prompt_tokens, 0 if reply is None else reply.usage.completion_tokens),
            penstock=msgspec.UNSET if fields is None else fields,
        )

    def _stopped(self, reply: TurnReply) -> tuple[StopReason, str | None]:
        """Why the turn ended, and the string that ended it."""
        if reply.finish_reason == "stop" and reply.end_token is None:
            said = self._run.wording.tokenizer.decode(reply.ids)
            found = [(said.index(text), text) for text in self._asked.stop or () if text in said]
            if found:
                return "stop_sequence", min(found)[1]
        return _REASONS[reply.finish_reason], None


def _tool_use(call: ToolCall, *, with_input: bool) -> dict[str, Any]:
    given = msgspec.Raw(call.function.arguments.encode() if with_input else b"{}")
    return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": given}


def _text_events(index: int, text: str, *, is_first: bool) -> list[JsonObject]:
    start: JsonObject = {
        "type": "content_block_start",
        "index": index,
        "content_block": {"type": "text", "text": ""},
    }
    delta: JsonObject = {"type": "text_delta", "text": text}
    return [*([start] if is_first else []), {"type": "content_block_delta", "index": index, "delta": delta}]
