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
import sys
import time
from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from penstock.backends.episodes.conversation import Conversation
from penstock.backends.episodes.dialogue import ConversationError, MalformedError
from penstock.backends.episodes.interfaces import EpisodeInfraError, EpisodePolicyError, JsonObject, Task
from penstock.backends.episodes.played_turns import Call, End, EpisodeLimitError, ToolTimeoutError, Turn
from penstock.backends.episodes.playing import Answer, ModelLink, PlayRules, Saved, TurnAsked, Words
from penstock.backends.episodes.protocol import CallMade
from penstock.messages.turn_sampling import TurnSampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from penstock.backends.episodes.images import EpisodeImages

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
    "TurnSampling",
]

ResultT = TypeVar("ResultT")
MAX_NAME_CHARS: Final = 64
"""Of a call's name, its id and its error in traces: a model may have written them."""


class Play:
    """One episode: the task, and the conversations with the model. See the module."""

    def __init__(
        self,
        task: Task,
        num_prompt_tokens: int,
        rules: PlayRules,
        words: Words,
        link: ModelLink,
        images: EpisodeImages | None = None,
    ) -> None:
        self.task = task
        self.rules = rules
        self.words = words
        self.images = images
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
        self._num_parts = self._next_number = 1
        self.say, self.generate = self._main.say, self._main.generate
        self.choices, self.take = self._main.choices, self._main.take
        """All four as of any :class:`Conversation`: of the first."""

    # --- the first conversation -------------------------------------------------------------------------------

    @property
    def messages(self) -> list[JsonObject]:
        """See :class:`Conversation`."""
        return self._main.messages

    @property
    def room(self) -> int:
        """See :class:`Conversation`."""
        return self._main.room

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

    async def kept(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Messages with a reference in the place of each image, which is kept in the run's folder: so they can be
        saved. (:meth:`say` does so by itself.) A part of a message holds an image as bytes, an image of Pillow, or
        ``data:…;base64,…``.

        Raises:
            MalformedError: one is no image, is too large, or the run has none.
        """
        if self.images is not None:
            return await self.images.kept(messages)
        for place, message in enumerate(messages):
            content = message.get("content")
            for part in cast("list[object]", content) if isinstance(content, list) else ():
                if isinstance(part, dict) and cast("JsonObject", part).get("type") in ("image", "image_url"):
                    raise MalformedError(
                        f"messages[{place}]: the run shows no images; set episode.images: true, for a model that sees"
                    )
        return list(messages)

    def save(self, state: JsonObject) -> None:
        """The episode can go on from here, after a complete turn of the model, with this state (``saved``), if its
        engine dies. Without it, it begins again.

        Raises:
            ValueError: there are several conversations, or the state is no JSON.
        """
        if self._next_number > 1:
            raise ValueError("an episode with several conversations, or choices, cannot be saved")
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

    def taken(self, choice: int, into: int) -> None:
        """A conversation goes on with a choice."""
        self._link.take(choice, into)

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
        if self._num_parts >= self.rules.options.max_parts:
            self.is_cut_off = True
            raise EpisodeLimitError(f"{self._num_parts} conversations are all that episode.max_parts allows")
        self._num_parts += 1
        return Conversation(self, self.new_number(), name=name, is_trained=is_trained, parent=parent)

    def new_number(self) -> int:
        """Of one more conversation, or choice."""
        self._next_number += 1
        return self._next_number - 1
