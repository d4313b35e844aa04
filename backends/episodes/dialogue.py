"""What an agent sends, as token ids to put after those that are there.

Invariants:

* The tokens of a conversation are those that the model saw and made. A request has to go on from the last one: what it
  repeats is compared, never tokenised again, and only what it adds is rendered and tokenised.
* What the chat template puts after a turn of the assistant stands there exactly once, whether the model made the end
  token, was cut off, or ended with another.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

import msgspec

from penstock.backends.data.row import BadColumnError
from penstock.backends.episodes.api import ChatMessage, ContentPart, FunctionCall, JsonObject, ToolCall
from penstock.messages.base import UNREADABLE
from penstock.messages.json_depth import is_too_deep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.row import Message
    from penstock.backends.data.tokenizer import TextTokenizer

MARK: Final = f"reply{secrets.token_hex(8)}"
"""Stands for a turn of the assistant where only what surrounds it is wanted; nobody can have written it."""
ADVICE: Final = "a session is one conversation, to which requests only append; for another one open another session"


CheckRoom: TypeAlias = "Callable[[int], object]"
"""Raises where the next turn has no room for so many tokens more."""


class ConversationError(Exception):
    """A request does not go on from what there is. (HTTP 409)"""


class MalformedError(Exception):
    """A request cannot be made into tokens. (HTTP 400)"""


class _Reply(NamedTuple):
    """The assistant's turn that a request has to repeat."""

    message: ChatMessage
    end_text: str
    """Of the end token, if the model made one."""


class ChatDialogue:
    """One conversation of chat messages."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: TextTokenizer,
        *,
        shows_images: bool = False,
        check_room: CheckRoom | None = None,
    ) -> None:
        """``shows_images``: their messages may have some, which are kept. ``check_room``: see :func:`encoded`."""
        self._check_room = check_room
        self._shows_images = shows_images
        self._template = template
        self._tokenizer = tokenizer
        self._messages: list[ChatMessage] = []
        """Of the last request."""
        self._tools: list[JsonObject] = []
        self._reply: _Reply | None = None

    def tokens_for(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> list[int]:
        """What the model has to see before it answers this request: after all that there is, or, for the first request,
        in all. Nothing changes until :meth:`asked`.

        Raises:
            ConversationError: it does not go on from the last one.
            MalformedError: the template or the tokenizer refuses it.
        """
        if not messages or messages[-1].role == "assistant":
            raise MalformedError("messages: the last one must not be the assistant's, as that is what is asked for")
        if not self._shows_images and any(part.image for message in messages for part in parts_of(message)):
            raise MalformedError("messages: content of type 'image' is not served; only text is")
        if self._reply is None:
            return self._encode(self._render(messages, tools))
        return self._encode(self._continuation(self._reply, messages, tools))

    def added(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Those of a request that :meth:`tokens_for` has rendered: what comes after the last answer, or all."""
        return messages if self._reply is None else messages[len(self._messages) + 1 :]

    def asked(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> None:
        """This request is being answered."""
        self._messages, self._tools, self._reply = list(messages), list(tools), None

    def replied(self, message: ChatMessage, end_token: int | None) -> None:
        """This is the answer; ``end_token`` if the model ended it itself."""
        self._reply = _Reply(message, "" if end_token is None else self._tokenizer.token_text(end_token))

    def _continuation(self, reply: _Reply, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> str:
        before = self._messages
        self._check_extends(reply.message, messages)
        if list(tools) != self._tools:
            raise ConversationError(
                "tools: they are not those of the first request, after which the conversation stands as it is; "
                + ADVICE
            )
        new = messages[len(before) + 1 :]
        marked = _marked(reply.message)
        suffix = self._after_mark([*before, ChatMessage("assistant", MARK)], tools, begins_answer=False)
        try:
            alone = self._after_mark([*before, marked], tools, begins_answer=False)
        except _NoMarkError:  # some templates leave out the content of a message that has calls
            marked = _marked(reply.message, in_name=True)
            alone = self._after_mark([*before, marked], tools, begins_answer=False)
        going_on = self._after_mark([*before, marked, *new], tools, begins_answer=True)
        if not going_on.startswith(alone) or not alone.endswith(suffix):
            raise MalformedError(
                "messages: the chat template writes a turn of the assistant otherwise when other messages follow, so "
                "these cannot be put after the tokens that the model made"
            )
        return (suffix + going_on[len(alone) :]).removeprefix(reply.end_text)

    def _check_extends(self, reply: ChatMessage, messages: Sequence[ChatMessage]) -> None:
        known = [*self._messages, reply]
        for place, (theirs, ours) in enumerate(zip(messages, known, strict=False)):
            if not _is_same(theirs, ours):
                raise ConversationError(
                    f"messages[{place}]: it differs from what stands there since the request before ({_shown(ours)}, "
                    f"found {_shown(theirs)}); {ADVICE}"
                )
        if len(messages) <= len(known):
            raise ConversationError(
                f"messages: {len(messages)} of them, where {len(known)} are there already, the model's last answer "
                f"included, and at least one has to follow; {ADVICE}"
            )

    def _after_mark(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], *, begins_answer: bool) -> str:
        text = self._render(messages, tools, begins_answer=begins_answer)
        _, mark, after = text.partition(MARK)
        if not mark:
            raise _NoMarkError("messages: the chat template leaves out what the assistant has said")
        return after

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], *, begins_answer: bool = True
    ) -> str:
        # Nobody's message ends a turn or begins one; that is the template's to do. It is looked at as the template gets
        # it: in the text of arguments, an escape could spell a control token.
        inert = self._tokenizer.inert_json
        try:
            tools = inert(list(tools))
            rendered = [inert(_for_template(m), keeps_marks=m.role == "assistant") for m in messages]
            return self._template.render_messages(rendered, tools, begins_answer=begins_answer)
        except BadColumnError as error:
            raise MalformedError(f"messages: {error.message}") from None
        except RecursionError:
            raise MalformedError("messages, tools: they are nested too deeply") from None

    def _encode(self, text: str) -> list[int]:
        return encoded(self._tokenizer, text, special=False, check_room=self._check_room)


class TextDialogue:
    """One conversation of plain text, or of token ids."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_text: str,
        prompt_tokens: Sequence[int],
        check_room: CheckRoom | None = None,
    ) -> None:
        """The sample's prompt; a first request with this very text gets these very tokens."""
        self._check_room = check_room
        self._tokenizer = tokenizer
        self._prompt = (prompt_text, list(prompt_tokens))
        self._text: str | None = None
        """Of the last request and its answer; None before the first request."""

    def tokens_for(self, prompt: str | list[int], so_far: Sequence[int]) -> list[int]:
        """As :meth:`ChatDialogue.tokens_for`; ``so_far`` are the tokens of the conversation."""
        if isinstance(prompt, list):
            return self._from_tokens(prompt, so_far)
        if self._text is None:
            text, tokens = self._prompt
            return tokens if prompt == text else self._encode(prompt, special=True)
        if not prompt.startswith(self._text):
            raise ConversationError(f"prompt: it does not begin with the last prompt and its answer; {ADVICE}")
        return self._encode(prompt[len(self._text) :], special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return encoded(self._tokenizer, text, special=special, check_room=self._check_room)

    def _from_tokens(self, prompt: list[int], so_far: Sequence[int]) -> list[int]:
        checked_ids(self._tokenizer, prompt)
        if self._text is None:
            return prompt
        if prompt[: len(so_far)] != list(so_far):
            raise ConversationError(f"prompt: its tokens do not begin with those that there are; {ADVICE}")
        return prompt[len(so_far) :]

    def replied(self, prompt: str | list[int], answer: str) -> None:
        """This request got this answer."""
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        self._text = text + answer


class _NoMarkError(MalformedError):
    pass


def encoded(tokenizer: TextTokenizer, text: str, *, special: bool, check_room: CheckRoom | None = None) -> list[int]:
    """Token ids of a text.

    Args:
        tokenizer: of the model.
        text: of anybody: what a tool prints may be megabytes, each of which takes seconds.
        special: as of the tokenizer.
        check_room: raises where so many tokens have no room; asked of a long text before it is tokenised.

    Raises:
        MalformedError: the tokenizer refuses it.
    """
    if not text:
        return []
    if check_room is not None and (at_least := tokenizer.min_tokens(text)):
        check_room(at_least)
    ids = tokenizer.encode([text], special=special)[0]
    if isinstance(ids, str):
        raise MalformedError(f"the tokenizer refuses the text ({ids}); it may hold a character that the model lacks")
    return ids


def checked_ids(tokenizer: TextTokenizer, ids: Sequence[int]) -> Sequence[int]:
    """The ids, if all are the model's.

    Raises:
        MalformedError: one is not.
    """
    num_tokens = tokenizer.num_tokens
    if (wrong := next((number for number in ids if not 0 <= number < num_tokens), None)) is not None:
        raise MalformedError(f"token id {wrong}: the model has those from 0 to {num_tokens - 1}")
    return ids


def parts_of(message: ChatMessage) -> list[ContentPart]:
    """The content of a message: texts, one for those that follow each other, and images that are kept.

    Raises:
        MalformedError: a part of it is something else.
    """
    if message.content is None or isinstance(message.content, str):
        return [ContentPart("text", message.content or "")]
    found: list[ContentPart] = []
    for part in message.content:
        if part.type == "image" and part.image:
            found.append(ContentPart("image", image=part.image))
        elif part.type not in ("text", "input_text"):
            raise MalformedError(f"messages: content of type '{part.type}' is not served; text and images are")
        elif found and not found[-1].image:
            found[-1] = ContentPart("text", found[-1].text + part.text)
        else:
            found.append(ContentPart("text", part.text))
    return found or [ContentPart("text")]


def text_of(message: ChatMessage) -> str:
    """The texts of a message."""
    return "".join(part.text for part in parts_of(message))


def _for_template(message: ChatMessage) -> Message:
    """As templates are written for: arguments are objects, absent fields are absent."""
    role = "system" if message.role == "developer" else message.role
    parts = parts_of(message)
    rendered: Message = {"role": role, "content": text_of(message)}
    if any(part.image for part in parts):
        rendered["content"] = [
            {"type": "image"} if part.image else {"type": "text", "text": part.text} for part in parts
        ]
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": _arguments(c)}}
            for c in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def _arguments(call: ToolCall) -> object:
    text = call.function.arguments
    try:
        found = cast("object", msgspec.json.decode(text))
        return text if is_too_deep(text.encode()) else found
    except (*UNREADABLE, UnicodeEncodeError):
        return text


def _marked(message: ChatMessage, *, in_name: bool = False) -> ChatMessage:
    """The message with the mark for what the model wrote: its content, or the name of its first call."""
    if not in_name or not message.tool_calls:
        return msgspec.structs.replace(message, content=MARK)
    first = message.tool_calls[0]
    function = FunctionCall(MARK, first.function.arguments)
    return msgspec.structs.replace(
        message, tool_calls=[msgspec.structs.replace(first, function=function), *message.tool_calls[1:]]
    )


def _is_same(theirs: ChatMessage, ours: ChatMessage) -> bool:
    """Whether a message is the one that was there before. Clients put the assistant's in forms of their own: blanks
    around it, null for no text, arguments as another spelling of the same JSON, no text beside a call."""
    if theirs.role != ours.role or theirs.tool_call_id != ours.tool_call_id:
        return False
    their_calls, our_calls = _calls(theirs), _calls(ours)
    if their_calls != our_calls:
        return False
    their_text, our_text = text_of(theirs), text_of(ours)
    if ours.role != "assistant":
        return parts_of(theirs) == parts_of(ours)
    return their_text.strip() == our_text.strip() or (bool(our_calls) and not their_text)


def _calls(message: ChatMessage) -> list[tuple[str, str, object]]:
    return [(call.id, call.function.name, _arguments(call)) for call in message.tool_calls or []]


def _shown(message: ChatMessage) -> str:
    text = text_of(message) or ", ".join(call.function.name for call in message.tool_calls or [])
    return f"{message.role}: {text[:60]!r}{'…' if len(text) > 60 else ''}"
