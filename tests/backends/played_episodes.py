"""Functions that play, as users write them; which of them a sample asks for stands in its row. Loaded by tests from the
process that plays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

from penstock.backends.episodes.interfaces import EpisodePolicyError, ToolError
from penstock.backends.episodes.play import ConversationError, End, Play, TurnSampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.backends.episodes.interfaces import JsonObject


async def episode(play: Play) -> object:
    return await FUNCTIONS[str(play.task.metadata["do"])](play)


async def two_turns(play: Play) -> object:
    first = await play.generate(stop=[";"])
    second = await play.generate(" no ")
    assert not second.calls
    return {"reward": 1.0, "first": len(first.ids), "second": len(second.ids)}


async def nothing(play: Play) -> None:
    await play.generate()


async def returns(play: Play) -> object:
    await play.generate()
    return {"text": "good", "nan": float("nan"), "end": End(reward=0.5, outcome="policy_error", detail="it lied")}[
        str(play.task.metadata["what"])
    ]


async def raises(play: Play) -> object:
    await play.generate()
    kinds: dict[str, type[BaseException]] = {"tool": ToolError, "value": ValueError, "exit": SystemExit}
    raise kinds[str(play.task.metadata["what"])]("no such thing")


async def policy_error(play: Play) -> object:
    await play.generate()
    raise EpisodePolicyError("it cheated", reward=-1.0)


async def many_turns(play: Play) -> object:
    while True:
        await play.generate("a")


async def hangs_in_a_tool(play: Play) -> object:
    await play.generate()
    return await play.call(asyncio.sleep(3600), timeout_s=0.05, name="tool sleep")


async def is_silent(play: Play) -> object:
    await play.generate()
    await asyncio.sleep(3600)
    return 1


async def blocks(play: Play) -> object:
    await play.generate()
    time.sleep(3600)  # noqa: ASYNC251 - that is what it is about
    return 1


async def exits(play: Play) -> object:
    await play.generate()
    os._exit(3)


async def is_killed(play: Play) -> object:
    await play.generate()
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


async def never_ends(play: Play) -> object:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def leaves_a_turn(play: Play) -> object:
    turn = asyncio.ensure_future(play.generate())
    await asyncio.sleep(0.05)
    return int(turn.done())


async def agents(play: Play) -> object:
    await play.generate("one")
    other = play.conversation("other")
    await other.generate("two=")
    branch = play.branch()
    await branch.generate("three=")
    judge = play.conversation("judge", is_trained=False)
    verdict = await judge.generate("four=")
    await play.generate("five")
    return float(verdict.text == "yes")


async def too_many_agents(play: Play) -> object:
    await play.generate()
    for _ in range(10):
        await play.conversation().generate("a=")
    return 1


async def foreign_ids(play: Play) -> object:
    await play.generate([3, 10**6])
    return 1


async def saves(play: Play) -> object:
    count = 0 if play.saved is None else int(str(play.saved["count"]))
    while count < 3:
        await play.generate(str(count))
        count += 1
        state: JsonObject = {"count": count}
        play.save(state)
    return {"reward": 1.0, "turns": play.num_turns}


async def draws_otherwise(play: Play) -> object:
    cold = await play.generate(sampling=TurnSampling(temperature=0.0, seed=9))
    same = await play.generate("a", sampling=TurnSampling(temperature=1.0, top_k=0))
    return {"reward": 1.0, "masked": float(cold.masked == "other_sampling"), "same": float(same.masked == "")}


async def draws_only_otherwise(play: Play) -> object:
    await play.generate(sampling=TurnSampling(top_p=0.5))
    return 1.0


async def is_held_to_a_schema(play: Play) -> object:
    await play.generate(sampling=TurnSampling(**play.task.metadata["sampling"]))  # type: ignore[arg-type]
    return 1.0


async def chooses(play: Play) -> object:
    first = await play.choices(3, "one=")
    play.take(first[1])
    second = await play.choices(2, "two=")
    await play.generate("three=")
    try:
        play.take(second[0])
    except ConversationError:
        return 1.0
    return 0.0


async def takes_none(play: Play) -> object:
    await play.choices(2, "one=")
    return 1.0


def feedback(response: str, label: str, turn: int) -> str | float:
    return f" {label} " if turn < 3 else float(response == "yes")


FUNCTIONS: dict[str, Callable[[Play], Awaitable[object]]] = {function.__name__: function for function in (
    two_turns, nothing, returns, raises, policy_error, many_turns, hangs_in_a_tool, is_silent, blocks, exits,
    is_killed, never_ends, leaves_a_turn, agents, too_many_agents, foreign_ids, saves, draws_otherwise,
    draws_only_otherwise, is_held_to_a_schema, chooses, takes_none,
)}  # fmt: skip
