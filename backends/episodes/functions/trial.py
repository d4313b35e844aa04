"""Functions that play episodes, loaded to see whether they can be."""

from __future__ import annotations

import selectors
import time
from typing import TYPE_CHECKING

from penstock.backends.episodes.functions.driver import START_TIMEOUT_S
from penstock.backends.episodes.functions.process import PlayerProcess
from penstock.backends.episodes.functions.wire import Loaded, LoadFailed, Setup
from penstock.backends.processes.user_code import UserCodeError

if TYPE_CHECKING:
    from penstock.backends.episodes.functions.wire import FunctionSpecs


def check_loads(specs: FunctionSpecs, timeout_s: float = START_TIMEOUT_S) -> None:
    """Load them in a process as a run does. It is over with it, or with the deadline.

    Raises:
        UserCodeError: they cannot be loaded.
    """
    names = ", ".join(named.spec for named in specs.functions)
    process = PlayerProcess(time.monotonic())
    try:
        process.send(Setup(specs, "", None))
        with selectors.DefaultSelector() as selector:
            selector.register(process.socket, selectors.EVENT_READ)
            while left_s := max(0.0, process.started_at_s + timeout_s - time.monotonic()):
                selector.select(left_s)
                for said in process.receive():
                    if isinstance(said, Loaded):
                        return
                    if isinstance(said, LoadFailed):
                        raise UserCodeError(said.message)
                if process.is_gone:
                    raise UserCodeError(f"{names}: the process that loads it {process.fault or process.end()}")
    finally:
        process.end()
    raise UserCodeError(f"{names} did not load within {timeout_s:g} s")
