"""Simulations side by side: processes that play one after the other, for as long as there are any left.

For every wait: a simulation that takes longer than :data:`LIMIT_S` has its process ended by its own alarm, which ends
the wait of whoever asked for it. A process ends with the one that has started it, whatever ended that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeVar

from penstock.backends.processes.process_facts import end_with_parent
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

LIMIT_S: Final = 1800
"""Of one simulation."""
Job = TypeVar("Job")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0))


class Workers:
    """A number of processes; with one, everything is done in this process."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = (
            ProcessPoolExecutor(num_processes, context, initializer=end_with_parent, initargs=(signal.SIGKILL,))
            if num_processes > 1
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self, function: Callable[[Job], Result], jobs: Sequence[Job], *, on_done: Callable[[], None] | None = None
    ) -> list[Result]:
        """What the function makes of each job, in their order; ``on_done`` hears of each as soon as it is there.

        Args:
            function: one of a module, as other processes import it.
            jobs: what can be pickled.
            on_done: is called in this process.

        Raises:
            UserFault: a process was ended from outside, or by its alarm.
        """
        told = on_done or _nothing
        if self._pool is None:
            results: list[Result] = []
            for job in jobs:
                results.append(function(job))
                told()
            return results
        try:
            asked = [self._pool.submit(partial(_limited, function), job) for job in jobs]
            for future in as_completed(asked):
                future.result()
                told()
            return [future.result() for future in asked]
        except BrokenProcessPool:
            raise UserFault(
                f"a process with a simulation was ended: it took longer than {LIMIT_S} s, or no memory was "
                "left; take fewer engines or smaller batches, or fewer processes with --processes 1"
            ) from None


def _limited(function: Callable[[Job], Result], job: Job) -> Result:
    signal.alarm(LIMIT_S)
    try:
        return function(job)
    finally:
        signal.alarm(0)


def _nothing() -> None:
    """Nobody wants to hear."""
