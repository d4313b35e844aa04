"""Functions of a user that kill one side of a colocated run from within a turn, so that the turn is the one meant.

An episode runs where its engine has the device, an estimator of advantages where the learner has it. Each fault comes
once, in this order, when so many steps are recorded; a file says that it has come. A test puts a copy of this module
beside the run.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.backends.episodes.play import Play

OWN: Final = "rank"
"""The process that asks, which is a rank of the learner."""
FAULTS: Final = (("engines", "engine/0"), ("learner", "engine/1"), ("engines", "learner"), ("learner", OWN))
STEPS_BETWEEN: Final = 2


def mark_of(folder: Path, number: int) -> Path:
    """What is there when this fault has come."""
    return folder / f"fault-{number}"


def strike(turn: str) -> None:
    """Kill whom the next fault names, if it is to come in this turn, and now."""
    folder = Path(__file__).parent
    (record,) = folder.glob("*/run.json")
    number = sum(mark_of(folder, number).exists() for number in range(len(FAULTS)))
    metrics = record.with_name("metrics.jsonl")
    num_steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    if number == len(FAULTS) or FAULTS[number][0] != turn or num_steps < 1 + STEPS_BETWEEN * number:
        return
    try:
        mark_of(folder, number).touch(exist_ok=False)
    except FileExistsError:
        return  # another process was faster
    victim = FAULTS[number][1]
    found = re.findall(rf"\b{victim} \d+ is process (\d+)", (record.parent / "logs" / "driver.log").read_text())
    os.kill(os.getpid() if victim == OWN else int(found[-1]), signal.SIGKILL)


async def episode(play: Play) -> None:
    """Runs in an engine's process."""
    strike("engines")
    await play.generate()


def advantages(given: Any, options: Any) -> Any:  # noqa: ANN401 - tensors, and the function takes what it is given
    """Runs in every rank of the learner."""
    strike("learner")
    return given.samples.spread(given.rewards - given.rewards.mean())
