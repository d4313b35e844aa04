"""An episode of three turns with a slow tool between them, that goes on elsewhere when its engine dies. Loaded by tests
from the process that plays."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from penstock.backends.episodes.interfaces import ToolError

if TYPE_CHECKING:
    from penstock.backends.episodes.play import Play

NUM_TURNS = 3
TOOL_S = 0.25


async def look_up(number: int) -> str:
    """Slow, and wrong about every third question."""
    await asyncio.sleep(TOOL_S)
    if number == NUM_TURNS - 1:
        raise ToolError("nothing is known of that")
    return " so"


async def episode(play: Play) -> float:
    """Three turns, two calls."""
    while True:
        turn = await play.generate("" if play.num_turns == 0 else " and", max_new_tokens=4)
        if play.num_turns == NUM_TURNS:
            return float(len(turn.ids))
        with contextlib.suppress(ToolError):
            await play.call(look_up(play.num_turns))
        play.save({"turns": play.num_turns})
