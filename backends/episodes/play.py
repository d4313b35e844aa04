"""What a function that plays an episode is given: the task, and a model to talk to.

```python
from penstock.backends.episodes.play import Play

async def episode(play: Play) -> float:
    turn = await play.say(play.task.messages)
    while "?" in turn.text:
        answer = await play.call(look_up(turn.text), timeout_s=10)
        turn = await play.say([*play.messages, {"role": "user", "content": answer}])
    return float(play.task.label in turn.text)
```

Invariants:

* What the model sees is what stands there token by token: a conversation only grows, what it repeats is compared, and
  only what is new is rendered and tokenised. The tokens of a turn are those that the engine drew.
* Everything that the model did not write has loss mask 0.
* One turn runs at a time in an episode; who asks meanwhile, of this conversation or another, waits for it.

| waits for | who ends it |
|---|---|
| a turn | the engine, whose deadlines hold as for any generation |
| ``call`` | what is awaited; its deadline |
| anything else that the function awaits | ``episode.idle_timeout_s`` and ``episode.timeout_s`` |
"""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from penstock.backends.episodes.api import ChatMessage, FunctionCall, ToolCall
from penstock.backends.episodes.dialogue import ChatDialogue, ConversationError, MalformedError, encoded
from penstock.backends.episodes.interfaces import EpisodeInfraError, EpisodePolicyError, JsonObject, Task, Tool
from penstock.backends.episodes.played_turns import Call, End, EpisodeLimitError, ToolTimeoutError, Turn
from penstock.backends.episodes.playing import (
    NOTHING,
    PROMPT,
    Answer,
    ModelLink,
    PlayRules,
    Saved,
    TurnAsked,
    Words,
)
from penstock.backends.episodes.protocol import CallMade
from penstock.backends.episodes.stops import before_stop
from penstock.backends.episodes.tool_calls import parse_tool_calls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence


__all__ = [
    "Call",
    "Conversation",
    "ConversationError",
    "End",
    "EpisodeInfraError",
    "EpisodeLimitError",
    "EpisodePolicyError",
    "MalformedError",
    "Play",
    "Task",
    "ToolTimeoutError",
    "Turn",
]

ResultT = TypeVar("ResultT")
MAX_NAME_CHARS: Final = 64
"""Of a call's name, its id and its error in traces: a model may have written them."""


class Conversation:
    """One growing sequence of tokens that the model goes on from. Each that the model has said something in becomes one
    part of the sample."""

    def __init__(self, play: Play, number: int, *, name: str, is_trained: bool, parent: Conversation | None) -> None:
        self.name = name
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
    ) -> Turn:
        """The model's answer to a chat. ``messages`` are all of it: those that there are (``messages`` of this
        conversation) and at least one more.

        Raises:
            ConversationError: they do not go on from those that there are.
            MalformedError: they cannot be made into tokens.
            EpisodeLimitError: a limit of the scenario is reached.
        """
        if self._has_begun and self._dialogue is None:
            raise ConversationError("this conversation was begun with `generate`; go on with that")
        asked = [_as_message(message, place) for place, message in enumerate(messages)]
        described = [_as_schema(tool) for tool in tools]
        async with self._play.lock:
            dialogue = self._dialogue or ChatDialogue(self._play.words.template, self._play.words.tokenizer)
            tokens = dialogue.tokens_for(asked, described)
            answer = await self._answered(tokens, max_new_tokens, tuple(stop), in_chat=True)
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
            answer = await self._answered(self._ids(added), max_new_tokens, tuple(stop), in_chat=False)
            return self._turn(answer, tuple(stop), has_tools=False)

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
            self._dialogue = ChatDialogue(self._play.words.template, self._play.words.tokenizer)
            self._dialogue.asked(saved.messages, saved.tools)
            self._dialogue.replied(saved.reply, saved.end_token)
            self._messages = [_as_object(message) for message in (*saved.messages, saved.reply)]
            self._tools = saved.tools

    async def _answered(
        self, tokens: Sequence[int], max_new_tokens: int | None, stop: tuple[str, ...], *, in_chat: bool
    ) -> Answer:
        play = self._play
        base = NOTHING if self._number or in_chat else PROMPT
        if self._parent is not None:
            base = self._parent._number
        has_base = self._has_begun or base != NOTHING
        num_before = len(tokens) + (self._num_tokens if has_base else 0)
        limit = play.limit(num_before, max_new_tokens)
        if not all(stop):
            raise MalformedError("stop: expected strings, none of them empty")
        answer = await play.turn(TurnAsked(self._number, base, tuple(tokens), limit, stop, self.is_trained, in_chat))
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
        )
        return self._last

    def _ids(self, added: str | Sequence[int]) -> Sequence[int]:
        tokenizer = self._play.words.tokenizer
        if isinstance(added, str):
            return encoded(tokenizer, added, special=False)
        wrong = next((number for number in added if not 0 <= number < tokenizer.num_tokens), None)
        if wrong is not None:
            raise MalformedError(f"token id {wrong}: the model has those from 0 to {tokenizer.num_tokens - 1}")
        return added


class Play:
    """One episode: the task, and the conversations with the model. See the module."""

    def __init__(self, task: Task, num_prompt_tokens: int, rules: PlayRules, words: Words, link: ModelLink) -> None:
        self.task = task
        self.rules = rules
        self.words = words
        self.lock = asyncio.Lock()
        self.num_turns = 0
        """Of all conversations."""
        self.saved: JsonObject | None = None
        """What an earlier attempt of this episode has saved; then ``messages`` are those of then, and the episode goes
        on. None: it begins."""
        self.is_cut_off = False
        """A limit has ended the last turn, or refused the next one."""
        self._is_spoilt = False
        """A turn runs, or was given up by whoever waited for it."""
        self._link = link
        self._main = Conversation(self, 0, name="", is_trained=True, parent=None)
        self._main.begins_with(num_prompt_tokens, task.messages)
        self._conversations = [self._main]

    # --- the first conversation -------------------------------------------------------------------------------

    @property
    def messages(self) -> list[JsonObject]:
        """See :class:`Conversation`."""
        return self._main.messages

    @property
    def room(self) -> int:
        """See :class:`Conversation`."""
        return self._main.room

    async def say(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[Tool | JsonObject] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """See :meth:`Conversation.say`."""
        return await self._main.say(messages, tools=tools, max_new_tokens=max_new_tokens, stop=stop)

    async def generate(
        self, added: str | Sequence[int] = "", *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """See :meth:`Conversation.generate`."""
        return await self._main.generate(added, max_new_tokens=max_new_tokens, stop=stop)

    # --- others -----------------------------------------------------------------------------------------------

    def conversation(self, name: str = "", *, is_trained: bool = True) -> Conversation:
        """A new conversation, with nothing in it: a sub-agent, the other side of an argument, a judge
        (``is_trained=False``). It is another part of this sample, with this sample's reward.

        Raises:
            EpisodeLimitError: there are ``episode.max_parts`` already.
        """
        return self._add(name, is_trained=is_trained, parent=None)

    def branch(self, name: str = "", *, of: Conversation | None = None, is_trained: bool = True) -> Conversation:
        """A conversation that goes on from where one (the first, if none is given) stands now. What stands there is its
        context, and is trained where it was said, once.

        Raises:
            EpisodeLimitError: there are ``episode.max_parts`` already.
        """
        return self._add(name, is_trained=is_trained, parent=of or self._main)

    async def call(
        self,
        awaitable: Awaitable[ResultT],
        timeout_s: float | None = None,
        *,
        name: str = "",
        answers: Call | None = None,
    ) -> ResultT:
        """Await a tool, an environment, another server, at most so long (``episode.tool_timeout_s`` if nothing is
        given). In the sample's trace it stands with its name and time, and with the call of the model that it
        ``answers``.

        Raises:
            ToolTimeoutError: it took longer. Who does not catch it has an episode that is tried again.
        """
        begin_ns = time.time_ns()
        try:
            return await self._awaited(awaitable, timeout_s, name)
        finally:
            raised, end_ns = sys.exception(), time.time_ns()
            tool = name or str(getattr(awaitable, "__name__", type(awaitable).__name__))
            call_id, tool = ("", tool) if answers is None else (answers.id, answers.name)
            error = "" if raised is None else type(raised).__name__[:MAX_NAME_CHARS]
            self._link.called(CallMade(tool[:MAX_NAME_CHARS], call_id[:MAX_NAME_CHARS], begin_ns, end_ns, error))

    def save(self, state: JsonObject) -> None:
        """The episode can go on from here, after a complete turn of the model, with this state (``saved``), if its
        engine dies. Without it, it begins again.

        Raises:
            ValueError: there are several conversations, or the state is no JSON.
        """
        if len(self._conversations) > 1:
            raise ValueError("an episode with several conversations cannot be saved")
        if self.num_turns:
            self._link.save(msgspec.json.encode(self._main.saved(state, self.num_turns)))

    # --- inside -----------------------------------------------------------------------------------------------

    def restore(self, saved: bytes) -> None:
        """Go on from there."""
        where = msgspec.json.decode(saved, type=Saved)
        self.num_turns, self.saved = where.num_turns, where.state
        self._main.restore(where)

    def limit(self, num_before: int, max_new_tokens: int | None) -> int:
        """How many tokens the next turn may have."""
        rules = self.rules
        if self.num_turns >= rules.options.max_turns:
            self.is_cut_off = True
            raise EpisodeLimitError(f"{self.num_turns} turns are all that episode.max_turns allows")
        if not num_before:
            raise MalformedError("the conversation has no token that the model could go on from")
        room = rules.max_context - num_before
        if room < 1:
            self.is_cut_off = True
            raise EpisodeLimitError(
                f"{num_before} tokens leave no room for an answer in model.max_context of {rules.max_context}"
            )
        if max_new_tokens is not None and max_new_tokens < 1:
            raise MalformedError(f"max_new_tokens: must be at least 1, found {max_new_tokens}")
        return min(room, rules.max_response_tokens, room if max_new_tokens is None else max_new_tokens)

    async def _awaited(self, awaitable: Awaitable[ResultT], timeout_s: float | None, name: str) -> ResultT:
        limit_s = self.rules.options.tool_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await awaitable
        except TimeoutError:
            if not deadline.expired():
                raise
            key = " (episode.tool_timeout_s)" if timeout_s is None else ""
            raise ToolTimeoutError(f"{name or 'what was called'} took longer than {limit_s:g} s{key}") from None

    async def turn(self, asked: TurnAsked) -> Answer:
        """One turn of the model in a conversation."""
        if self._is_spoilt:
            raise EpisodeInfraError("a turn was given up while the model made it; nothing can follow it")
        self._is_spoilt = True
        answer = await self._link.turn(asked)
        self._is_spoilt = False
        self.num_turns += 1
        self.is_cut_off = answer.ended_by == "length"
        return answer

    def _add(self, name: str, *, is_trained: bool, parent: Conversation | None) -> Conversation:
        if len(self._conversations) >= self.rules.options.max_parts:
            self.is_cut_off = True
            raise EpisodeLimitError(f"{len(self._conversations)} conversations are all that episode.max_parts allows")
        added = Conversation(self, len(self._conversations), name=name, is_trained=is_trained, parent=parent)
        self._conversations.append(added)
        return added


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
