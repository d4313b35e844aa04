"""The reward function of a run under chaos: the scenario's own, which misbehaves when it is told to.

Loaded by the processes that call reward functions, as ``rewards.py:Misbehaving``. It is told through files in a
folder: whoever of these processes manages to remove a file does what its name says, once. A sample meets no second
order: its call is tried again at once, and orders that wait together would use up its retries.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from penstock.backends.rewards.functions import REWARD, load_function

FUNCTION_VARIABLE: Final = "PENSTOCK_CHAOS_REWARD"
"""The scenario's reward function."""
ORDERS_VARIABLE: Final = "PENSTOCK_CHAOS_ORDERS"
"""Folder with the orders."""
MET_FOLDER: Final = "met"
"""Beside it: a file for each sample that has met one."""
HANG_S: Final = 3600.0


class MisbehavingError(RuntimeError):
    """Raised because chaos wants it."""


class Misbehaving:
    """Calls the scenario's function, but for the calls that are to fail."""

    def __init__(self) -> None:
        self._loaded = load_function(REWARD, os.environ[FUNCTION_VARIABLE])
        self._orders = Path(os.environ[ORDERS_VARIABLE])

    def __call__(self, **arguments: object) -> object:
        match self._order(f"{arguments['group_id']}-{arguments['index']}"):
            case "reward_hang":
                time.sleep(HANG_S)
            case "reward_throw":
                raise MisbehavingError("the reward function was told to raise")
            case "reward_nan":
                return float("nan")
            case "reward_exit":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                pass
        return self._loaded.function(**{name: arguments[name] for name in self._loaded.names})

    def _order(self, sample: str) -> str:
        mark = self._orders.with_name(MET_FOLDER) / sample
        if mark.exists():
            return ""
        for order in self._orders.iterdir():
            try:
                order.unlink()
            except FileNotFoundError:  # another process was quicker
                continue
            mark.touch()
            return order.name.partition("-")[0]
        return ""
