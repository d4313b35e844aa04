"""The ready episode: the model talks to tools, to an environment, or to both.

Without an environment it is over with the first answer that calls no tool, and the scenario's reward function scores
it. An environment answers everything that is no call of a tool; what it gives as rewards is added up, and where it
gives none at all, the reward function scores here too.

What the model does wrong (a tool that there is not, arguments that are no JSON, ``ToolError``) it gets to read. What a
tool or the environment does wrong (any other exception, a deadline, a result that is no text) makes the sample an
``infra_error``. Where the environment can be restored, and with tools alone, the episode goes on after its last
complete turn when its engine dies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import msgspec

from penstock.backends.episodes.functions.ingredients import load_environment, load_tools
from penstock.backends.episodes.interfaces import (
    EpisodeInfraError,
    EpisodePolicyError,
    JsonObject,
    Observation,
    Restorable,
    Tool,
    ToolError,
)
from penstock.backends.episodes.play import Call, End, EpisodeLimitError, Play, Turn
from penstock.backends.episodes.tool_calls import HERMES_OPEN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from penstock.backends.episodes.functions.wire import FunctionSpecs
    from penstock.backends.episodes.interfaces import Environment

MALFORMED: Final = (
    'error: this is no call of a tool; one is <tool_call>{"name": …, "arguments": {…}}</tool_call>, with valid JSON'
)


class State(msgspec.Struct):
    """Of an episode after a complete turn."""

    messages: list[JsonObject]
    """Messages that the model is to read next."""
    reward: float | None = None
    components: dict[str, float] = {}
    environment: JsonObject | None = None


def multi_turn(specs: FunctionSpecs) -> Callable[[Play], Awaitable[object]]:
    """The function that plays it.

    Raises:
        UserCodeError: a tool or the environment cannot be loaded.
    """
    tools = {tool.name: tool for tool in load_tools(specs.tools)}
    environment = load_environment(specs.environment) if specs.environment else None

    async def episode(play: Play) -> object:
        world = None if environment is None else environment()
        game = _Game(play, tools, world)
        try:
            return await game.play_out()
        finally:
            if world is not None:
                await play.call(world.close(), name="close() of the environment")

    return episode


class _Game:
    def __init__(self, play: Play, tools: Mapping[str, Tool], world: Environment | None) -> None:
        self._play = play
        self._tools = tools
        self._world = world
        self._state = State([])
        self._is_over = False

    async def play_out(self) -> object:
        try:
            await self._begin()
            while not self._is_over:
                turn = await self._turn(self._state.messages)
                if turn.finish_reason == "length":
                    return self._end()
                await self._react(turn)
        except EpisodeLimitError:
            return self._end(is_cut_off=True)
        except EpisodePolicyError as error:
            if error.reward is None and self._state.reward is not None:
                raise EpisodePolicyError(str(error), reward=self._state.reward) from None
            raise
        return self._end()

    def _end(self, *, is_cut_off: bool = False) -> End:
        state = self._state
        end = End(reward=state.reward, components=state.components if state.reward is not None else {})
        return replace(end, outcome="truncated") if is_cut_off else end

    async def _begin(self) -> None:
        world, play = self._world, self._play
        if play.saved is not None:
            self._state = msgspec.convert(play.saved, State)
            if self._state.environment is not None:
                cast("Restorable", world).restore(self._state.environment)
        elif world is not None:
            await self._take(await play.call(world.reset(play.task), name="reset() of the environment"))

    async def _turn(self, messages: Sequence[JsonObject]) -> Turn:
        play = self._play
        if play.rules.uses_chat:
            return await play.say([*play.messages, *messages], tools=list(self._tools.values()))
        if any(isinstance(message.get("content"), list) for message in messages):
            raise EpisodeInfraError("a message has parts (images, say), which need data.chat_template: true")
        return await play.generate("".join(_text(message) for message in messages))

    async def _react(self, turn: Turn) -> None:
        if turn.calls:
            self._state.messages = await self._play.kept([await self._called(call) for call in turn.calls])
        elif self._tools and HERMES_OPEN in turn.text and self._play.rules.options.tool_format == "hermes":
            self._state.messages = [{"role": "user", "content": MALFORMED}]
        elif self._world is None:
            self._is_over = True
            return
        else:
            await self._step(self._world, turn.text)
        self._save()

    async def _called(self, call: Call) -> JsonObject:
        tool = self._tools.get(call.name)
        result: str | Sequence[JsonObject]
        if tool is None:
            result = f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        else:
            try:
                result = await self._play.call(tool.call(call.arguments), name=f"tool {call.name}", answers=call)
            except ToolError as error:
                result = f"error: {error}"
        if not isinstance(cast("object", result), str | list):
            raise EpisodeInfraError(
                f"tool {call.name} returned {type(result).__name__}; expected text, or a list of parts of a message"
            )
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}

    async def _step(self, world: Environment, action: str) -> None:
        try:
            observation = await self._play.call(world.step(action), name="step() of the environment")
        except ToolError as error:
            self._state.messages = [{"role": "user", "content": f"error: {error}"}]
            return
        await self._take(observation)

    async def _take(self, observation: object) -> None:
        if not isinstance(observation, Observation):
            raise EpisodeInfraError(f"the environment returned {type(observation).__name__}; expected an Observation")
        state = self._state
        state.messages = await self._play.kept(observation.messages)
        if observation.reward is not None:
            state.reward = (state.reward or 0.0) + observation.reward
        state.components.update(observation.components)
        self._is_over = observation.is_over
        if not observation.is_over and not state.messages and self._play.num_turns:
            raise EpisodeInfraError("the environment is not over and shows nothing that the model could answer")

    def _save(self) -> None:
        if self._is_over:
            return
        world = self._world
        if world is None:
            self._play.save(_as_object(self._state))
        elif isinstance(world, Restorable):
            self._state.environment = world.save()
            self._play.save(_as_object(self._state))


def _as_object(state: State) -> JsonObject:
    return cast("JsonObject", msgspec.to_builtins(state))


def _text(message: JsonObject) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
