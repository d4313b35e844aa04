"""Functions that play episodes, as a scenario names them.

``file.py:function`` has one of two forms, told apart by the arguments it asks for:

* ``async def episode(play)``: it has the whole episode in its hands, see :mod:`penstock.backends.episodes.play`.
* ``def feedback(prompt, response, label)``: it is asked after each turn of the model, and returns what the model is to
  read next, a text; or how the episode ends: nothing, a number, or a ``dict`` as reward functions return. Plain or
  ``async``; of :data:`FEEDBACK_NAMES` it gets those that it declares.

A class is called once without arguments, and the object it makes is the function. Any other name is a ready one.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from penstock.backends.processes.signatures import declared_names
from penstock.backends.processes.user_code import UserCodeError, load_object, split_spec, text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from penstock.backends.episodes.functions.wire import FunctionSpecs
    from penstock.backends.episodes.play import Play

MULTI_TURN: Final = "multi_turn"
READY: Final = (MULTI_TURN,)
FEEDBACK_NAMES: Final = ("prompt", "response", "label", "metadata", "messages", "turn", "conversation")


class PlayFunction(NamedTuple):
    """A function that is ready to play."""

    run: Callable[[Play], Awaitable[object]]
    path: Path | None
    """The user's file; None for a ready one."""


def load_functions(specs: FunctionSpecs) -> dict[str, PlayFunction]:
    """All of them by name.

    Raises:
        UserCodeError: one cannot be loaded, or asks for something that there is not.
    """
    return {named.name: load_function(named.spec, specs) for named in specs.functions}


def load_function(spec: str, specs: FunctionSpecs) -> PlayFunction:
    """One of them."""
    if ":" not in spec:
        if spec != MULTI_TURN:
            raise UserCodeError(f"episode.generate: {spec!r} is neither file.py:function nor one of {', '.join(READY)}")
        from penstock.backends.episodes.functions.multi_turn import multi_turn

        return PlayFunction(multi_turn(specs), None)
    found = load_object(spec)
    path, name = split_spec(spec)
    if isinstance(found, type):
        found = cast("Callable[[], object]", found)()
    if not callable(found):
        raise UserCodeError(f"{path}: {name!r} is {type(found).__name__}, which cannot be called")
    function: Callable[..., object] = found
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    parameters = inspect.signature(function).parameters
    if "response" in parameters:
        names = declared_names(function, spec, FEEDBACK_NAMES, "a function that answers responses")
        return PlayFunction(_with_feedback(function, names, is_async=is_async), path)
    _check_play_form(function, spec, is_async=is_async)
    return PlayFunction(cast("Callable[[Play], Awaitable[object]]", function), path)


def _check_play_form(function: Callable[..., object], spec: str, *, is_async: bool) -> None:
    expected = "expected `async def episode(play)`, or `def feedback(prompt, response, label)`"
    if not is_async:
        raise UserCodeError(f"{spec} is no `async def`, and does not ask for `response`; {expected}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise UserCodeError(f"{spec} cannot be called with one argument, the play ({error}); {expected}") from None


def _with_feedback(
    function: Callable[..., object], names: tuple[str, ...], *, is_async: bool
) -> Callable[[Play], Awaitable[object]]:
    async def episode(play: Play) -> object:
        task = play.task
        in_chat = play.rules.uses_chat
        texts: list[str] = []
        turn = await (play.say(play.messages) if in_chat else play.generate())
        while True:
            texts.append(turn.text)
            known: dict[str, object] = {
                "prompt": task.prompt,
                "response": turn.text,
                "label": task.label,
                "metadata": dict(task.metadata),
                "messages": play.messages,
                "turn": play.num_turns,
                "conversation": "".join(texts),
            }
            asked = {name: known[name] for name in names}
            said = function(**asked) if is_async else asyncio.to_thread(_called, function, asked)
            returned = await play.call(cast("Awaitable[object]", said), name="the function")
            if not isinstance(returned, str):
                return returned
            texts.append(returned)
            if in_chat:
                turn = await play.say([*play.messages, {"role": "user", "content": returned}])
            else:
                turn = await play.generate(returned)

    return episode


def _called(function: Callable[..., object], asked: dict[str, object]) -> object:
    """As a coroutine is: a ``StopIteration`` that leaves it (of a ``next`` without a default, say) would end the wait
    for a thread never."""
    try:
        return function(**asked)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {text_of(error)}").with_traceback(error.__traceback__) from error
