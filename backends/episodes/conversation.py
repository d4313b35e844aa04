"""One conversation of an episode with the model; see :mod:`penstock.backends.episodes.play`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from penstock.backends.episodes.api import ChatMessage, FunctionCall, ToolCall
from penstock.backends.episodes.dialogue import (
    ChatDialogue,
    ConversationError,
    MalformedError,
    checked_ids,
    encoded,
)
from penstock.backends.episodes.interfaces import JsonObject, Tool
from penstock.backends.episodes.played_turns import Call, Turn
from penstock.backends.episodes.playing import NOTHING, PROMPT, Answer, Saved, TurnAsked
from penstock.backends.episodes.stops import before_stop
from penstock.backends.episodes.tool_calls import parse_tool_calls
from penstock.backends.episodes.turn_sampling import checked
from penstock.messages.samples import Media

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from penstock.backends.episodes.images import EpisodeImages
    from penstock.backends.episodes.playing import PlayRules, Words
    from penstock.messages.turn_sampling import TurnSampling


class Player(Protocol):
    """What a conversation needs of its episode, which is a :class:`~penstock.backends.episodes.play.Play`."""

    rules: PlayRules
    words: Words
    lock: asyncio.Lock
    num_turns: int
    images: EpisodeImages | None

    async def kept(self, messages: Sequence[JsonObject]) -> list[JsonObject]: ...
    def limit(self, num_before: int, max_new_tokens: int | None) -> int: ...
    def new_number(self) -> int: ...
    async def turn(self, asked: TurnAsked) -> Answer: ...
    def taken(self, choice: int, into: int) -> None: ...


class Conversation:
    """One growing sequence of tokens that the model goes on from. Each that the model has said something in becomes one
    part of the sample."""

    def __init__(self, play: Player, number: int, *, name: str, is_trained: bool, parent: Conversation | None) -> None:
        self.name = name
        self._is_choice = False
        self.is_trained = is_trained
        self._play = play
        self._number = number
        self._parent = parent
        self._num_tokens = 0 if parent is None else parent.num_tokens
        self._num_context = self._num_tokens
        self._dialogue: ChatDialogue | None = None
        self._messages: list[JsonObject] = []
        self._tools: list[JsonObject] = []
        self._has_begun = False
        self._last: Turn | None = None
        self._choices: list[tuple[Turn, Conversation]] = []
        """Turns that can be taken."""
        if parent is not None:
            self._messages, self._tools, self._last = list(parent.messages), list(parent._tools), parent._last
            self._dialogue = copy.copy(parent._dialogue)

    @property
    def messages(self) -> list[JsonObject]:
        """The chat so far, the model's last answer included: the beginning of the next request. Of the task, before the
        first request of the first conversation; none before that of another."""
        return list(self._messages)

    @property
    def num_tokens(self) -> int:
        """Of all that stands there."""
        return self._num_tokens

    @property
    def room(self) -> int:
        """Tokens that still fit into ``model.max_context``."""
        return max(0, self._play.rules.max_context - self._num_tokens)

    async def say(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[Tool | JsonObject] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: TurnSampling | None = None,
    ) -> Turn:
        """The model's answer to a chat. ``messages`` are all of it: those that there are (``messages`` of this
        conversation) and at least one more.

        Raises:
            ConversationError: they do not go on from those that there are.
            MalformedError: they cannot be made into tokens, or have an image that cannot be shown.
            EpisodeLimitError: a limit of the scenario is reached.
        """
        if self._has_begun and self._dialogue is None:
            raise ConversationError("this conversation was begun with `generate`; go on with that")
        messages = await self._play.kept(messages)
        asked = [_as_message(message, place) for place, message in enumerate(messages)]
        described = [_as_schema(tool) for tool in tools]
        async with self._play.lock:
            dialogue = self._dialogue or self._new_dialogue()
            tokens, media = dialogue.tokens_for(asked, described), tuple[Media, ...]()
            if self._play.images is not None:
                tokens, media = self._play.images.placed(tokens, dialogue.added(asked))
            answer = await self._answered(tokens, max_new_tokens, tuple(stop), sampling, in_chat=True, media=media)
            self._dialogue = dialogue
            dialogue.asked(asked, described)
            turn = self._turn(answer, tuple(stop), has_tools=bool(described))
            dialogue.replied(_as_message(turn.message, len(asked)), turn.end_token)
            self._messages, self._tools = [*messages, turn.message], described
        return turn

    async def generate(
        self,
        added: str | Sequence[int] = "",
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: TurnSampling | None = None,
    ) -> Turn:
        """The model goes on after all that there is and ``added``, a text or token ids. The first conversation begins
        with the task's prompt, any other with nothing.

        Raises:
            MalformedError: the text or the ids are none of the model's.
            EpisodeLimitError: a limit of the scenario is reached.
        """
        if self._dialogue is not None:
            raise ConversationError("this conversation was begun with `say`; go on with that")
        async with self._play.lock:
            answer = await self._answered(self._ids(added), max_new_tokens, tuple(stop), sampling, in_chat=False)
            return self._turn(answer, tuple(stop), has_tools=False)

    async def choices(
        self,
        count: int,
        asked: Sequence[JsonObject] | str,
        *,
        tools: Sequence[Tool | JsonObject] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: TurnSampling | None = None,
    ) -> list[Turn]:
        """So many answers to the same: to a chat, as :meth:`say` takes it, or to a text that is added, as
        :meth:`generate` does. The conversation stands where it stood until one of them is taken (:meth:`take`); the
        others are no part of the sample.

        Raises:
            EpisodeLimitError, ConversationError, MalformedError: as those two.
        """
        if sampling is not None and sampling.seed is not None and count > 1:
            raise MalformedError("sampling: with a seed all choices would be the same; leave it out")
        found: list[tuple[Turn, Conversation]] = []
        play, num_before = self._play, self._num_tokens
        for _ in range(count):
            branch = Conversation(play, play.new_number(), name=self.name, is_trained=self.is_trained, parent=self)
            branch._is_choice = True
            if isinstance(asked, str):
                turn = await branch.generate(asked, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
            else:
                turn = await branch.say(asked, tools=tools, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
            found.append((turn, branch))
        self._choices = found if self._num_tokens == num_before else []
        return [turn for turn, _ in found]

    def take(self, turn: Turn) -> None:
        """The conversation goes on with this one of the last ``choices``.

        Raises:
            ConversationError: it is none of them, or the conversation has gone on meanwhile.
        """
        branch = next((branch for choice, branch in self._choices if choice is turn), None)
        if branch is None:
            raise ConversationError("take: it is none of the choices that this conversation was given last")
        self._play.taken(branch._number, self._number)
        self._messages, self._tools, self._last = branch._messages, branch._tools, turn
        self._dialogue, self._num_tokens = branch._dialogue, branch._num_tokens
        if not self._has_begun:
            self._has_begun, self._num_context = True, branch._num_context
        self._choices = []

    # --- inside -----------------------------------------------------------------------------------------------

    def begins_with(self, num_tokens: int, messages: Sequence[JsonObject]) -> None:
        """The sample's prompt stands there. Of the first conversation."""
        self._num_tokens, self._messages = num_tokens, list(messages)

    def saved(self, state: JsonObject, num_turns: int) -> Saved:
        """Where this conversation stands."""
        reply = None if self._dialogue is None or self._last is None else _as_message(self._last.message, 0)
        return Saved(
            state=state,
            num_turns=num_turns,
            num_tokens=self._num_tokens,
            num_response_tokens=self._num_tokens - self._num_context,
            messages=[] if reply is None else [_as_message(m, n) for n, m in enumerate(self._messages[:-1])],
            tools=self._tools,
            reply=reply,
            end_token=None if self._last is None else self._last.end_token,
        )

    def restore(self, saved: Saved) -> None:
        """Go on from there."""
        self._has_begun, self._num_tokens = True, saved.num_tokens
        self._num_context = saved.num_tokens - saved.num_response_tokens
        if saved.reply is not None:
            self._dialogue = self._new_dialogue()
            self._dialogue.asked(saved.messages, saved.tools)
            self._dialogue.replied(saved.reply, saved.end_token)
            self._messages = [_as_object(message) for message in (*saved.messages, saved.reply)]
            self._tools = saved.tools

    def _new_dialogue(self) -> ChatDialogue:
        words = self._play.words
        return ChatDialogue(
            words.template,
            words.tokenizer,
            shows_images=self._play.images is not None,
            check_room=self._check_room,
        )

    def _check_room(self, num_tokens: int) -> None:
        self._play.limit(num_tokens, None)

    def _base(self, *, in_chat: bool) -> int:
        """What stands before its first turn."""
        parent = self._parent
        if parent is None:
            return NOTHING if self._number or in_chat else PROMPT
        return parent._number if parent._has_begun or not self._is_choice else parent._base(in_chat=in_chat)

    async def _answered(
        self,
        tokens: Sequence[int],
        max_new_tokens: int | None,
        stop: tuple[str, ...],
        sampling: TurnSampling | None,
        *,
        in_chat: bool,
        media: tuple[Media, ...] = (),
    ) -> Answer:
        play = self._play
        base = self._base(in_chat=in_chat)
        has_base = self._has_begun or base != NOTHING
        num_before = len(tokens) + (self._num_tokens if has_base else 0)
        limit = play.limit(num_before, max_new_tokens)
        if not all(stop):
            raise MalformedError("stop: expected strings, none of them empty")
        wishes = checked(sampling, play.rules.can)
        new = TurnAsked(
            self._number, base, tuple(tokens), limit, stop, self.is_trained, in_chat, wishes, self._is_choice,
            media,
        )  # fmt: skip
        answer = await play.turn(new)
        self._choices = []
        if not self._has_begun:
            self._has_begun, self._num_context = True, num_before
        self._num_tokens = num_before + len(answer.ids)
        return answer

    def _turn(self, answer: Answer, stop: tuple[str, ...], *, has_tools: bool) -> Turn:
        play = self._play
        text = before_stop(play.words.tokenizer.decode(answer.ids), stop)
        parsed = parse_tool_calls(text, play.rules.options.tool_format if has_tools else "none")
        calls = [
            ToolCall(f"{self._number:02x}{play.num_turns:04x}{number:03x}", FunctionCall(*call))
            for number, call in enumerate(parsed.calls)
        ]
        content = (parsed.content.strip() or None) if calls else parsed.content
        self._last = Turn(
            text=parsed.content.strip() if calls else parsed.content,
            calls=tuple(
                Call(id=call.id, name=call.function.name, arguments=_arguments(call.function.arguments))
                for call in calls
            ),
            finish_reason="length" if answer.ended_by == "length" else "tool_calls" if calls else "stop",
            ended_by=answer.ended_by,
            ids=answer.ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            message=_as_object(ChatMessage("assistant", content, calls or None)),
            end_token=answer.ids[-1] if answer.ended_by == "end_token" and answer.ids else None,
            masked=answer.masked,
        )
        return self._last

    def _ids(self, added: str | Sequence[int]) -> Sequence[int]:
        tokenizer = self._play.words.tokenizer
        if isinstance(added, str):
            return encoded(tokenizer, added, special=False, check_room=self._check_room)
        return checked_ids(tokenizer, added)


def _as_message(message: JsonObject, place: int) -> ChatMessage:
    try:
        return msgspec.convert(message, ChatMessage)
    except msgspec.ValidationError as error:
        raise MalformedError(f"messages[{place}]: {error}") from None


def _as_object(message: ChatMessage) -> JsonObject:
    return cast("JsonObject", msgspec.to_builtins(message))


def _as_schema(tool: Tool | JsonObject) -> JsonObject:
    if isinstance(tool, dict):
        return tool
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _arguments(text: str) -> JsonObject:
    return msgspec.json.decode(text, type=JsonObject)
