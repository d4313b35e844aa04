"""Functions that do what no function should: which one, the response (or the row) says."""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backends.episodes.play import Play


def misbehave(what: str) -> Any:  # noqa: ANN401 - that is what it is for
    """Do it."""
    match what:
        case "raises":
            raise ValueError("no such thing")
        case "raises nothing to say":
            raise RuntimeError
        case "asserts":
            assert len(what) == 0, "it is not"
        case "finds nothing":
            next(iter(()))
        case "exits":
            sys.exit(3)
        case "interrupts":
            raise KeyboardInterrupt
        case "raises above all classes":
            raise BaseException("not even an Exception")
        case "raises what cannot be shown":
            raise UnshownError
        case "recurses":
            return misbehave("recurses")
        case "divides":
            return 1 / 0
        case "returns itself":
            found: list[Any] = []
            found.append(found)
            return found
        case "returns a function":
            return misbehave
        case "returns complex":
            return 1j
        case "returns too much":
            return 10**400
        case "returns what cannot be shown":
            return Unshown()
        case "prints":
            print("x" * 100_000)
            return float("nan")
        case "takes the process down":
            os._exit(3)
        case "hangs":
            time.sleep(3600)
        case "hangs where nothing stops it":
            while True:
                pass
        case _:
            return ast.literal_eval(what)
    return None


class UnshownError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("secret")


class Unshown:
    """Has no repr."""

    def __repr__(self) -> str:
        raise ValueError("secret")


def score(response: str) -> Any:  # noqa: ANN401
    """A reward function."""
    return misbehave(response)


async def episode(play: Play) -> Any:  # noqa: ANN401
    """An episode."""
    await play.generate()
    return misbehave(str(play.task.metadata["do"]))


def answers(response: str, metadata: dict[str, str]) -> Any:  # noqa: ANN401
    """A plain function that answers a response."""
    return misbehave(metadata["do"])


async def starts_tasks(play: Play) -> float:
    """An episode with a task that it awaits, or leaves to itself, or with a callback."""
    await play.generate()
    loop, how = asyncio.get_running_loop(), play.task.metadata["how"]
    if how == "callback":
        loop.call_soon(misbehave, "interrupts")
    elif how != "nothing":
        task = loop.create_task(later(str(play.task.metadata["do"])))
        if how == "awaited":
            await task
    else:
        gc.collect()  # tasks that earlier episodes left, whose errors were told then
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return 0.5


async def later(what: str) -> Any:  # noqa: ANN401
    """In a task."""
    return misbehave(what)


async def score_elsewhere(response: str) -> float:
    """An ``async`` reward function, whose task is not awaited."""
    asyncio.get_running_loop().call_soon(misbehave, response)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return 0.5


not_a_function = 7


# What a row's column says is done for the first sample of its group; the others are good.


async def plays(play: Play) -> Any:  # noqa: ANN401
    """An episode."""
    await play.generate()
    if play.task.index:
        return None
    if play.task.attempt == 0:
        misbehave(str(play.task.metadata["first attempt"]))
    return misbehave(str(play.task.metadata["episode"]))


def judges(metadata: dict[str, str], index: int) -> Any:  # noqa: ANN401
    """A reward function."""
    return misbehave(metadata["reward"]) if index == 0 else float(index)


def sifts(metadata: dict[str, str], index: int) -> Any:  # noqa: ANN401
    """A filter of samples."""
    return misbehave(metadata["sift"]) if index == 0 else True


def keeps(metadata: dict[str, str]) -> Any:  # noqa: ANN401
    """A filter of groups."""
    return misbehave(metadata["keep"])


def looks(metadata: dict[str, str]) -> Any:  # noqa: ANN401
    """A hook that is shown every group."""
    return misbehave(metadata["look"])
