"""Waiting for processes that are not our children, and ending them, on an asyncio loop.

The kernel says when a process ends: a pidfd turns readable. Nothing here polls.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.processes.process_facts import (
    descendants_of,
    facts_of,
    is_running,
    kill,
    marked_processes,
    title_of,
)
from penstock.backends.processes.process_facts import how_it_ended as how_it_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class ServerProcess(NamedTuple):
    """One process that a server cannot do without."""

    name: str
    """``main``, ``scheduler``, ``scheduler_TP1``, ``detokenizer``, ``guardian``, …"""
    pid: int
    start_ticks: int


class Watch:
    """Calls back once when a process has ended, also when its parent has not reaped it yet."""

    def __init__(self, pid: int, callback: Callable[[], None]) -> None:
        """From here on; on the running loop.

        Raises:
            ProcessLookupError: there is no such process.
        """
        self._loop = asyncio.get_running_loop()
        self._handle = os.pidfd_open(pid)
        self._callback = callback
        self._loop.add_reader(self._handle, self._ended)

    def _ended(self) -> None:
        self.close()
        self._callback()

    def close(self) -> None:
        """Watch no longer."""
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1


def named_processes(main_pid: int, prefix: str) -> list[ServerProcess]:
    """The main process of a server and those below it whose title begins so, without that beginning."""
    found: list[ServerProcess] = []
    for pid in (main_pid, *descendants_of(main_pid)):
        title = title_of(pid)
        facts = facts_of(pid)
        if facts is not None and (pid == main_pid or title.startswith(prefix)):
            found.append(
                ServerProcess("main" if pid == main_pid else title.removeprefix(prefix), pid, facts.start_ticks)
            )
    return found


def exit_code_of(process: ServerProcess) -> int | None:
    """How somebody else's child has ended, as long as it is not reaped; None when that cannot be known any more."""
    facts = facts_of(process.pid)
    if facts is None or facts.start_ticks != process.start_ticks or facts.state != "Z":
        return None
    return os.waitstatus_to_exitcode(facts.wait_status)


async def end_marked(marks: Collection[bytes], timeout_s: float) -> list[int]:
    """Kill every process whose environment has all these ``NAME=value``, and wait until they are gone.

    Returns:
        Those that are still there after the time, which should be none.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while found := marked_processes(marks):  # until a whole look finds nobody: some may just have been started
        for pid, start_ticks in found.items():
            kill(pid, start_ticks)
        for pid, start_ticks in found.items():
            if not await has_ended(pid, start_ticks, deadline_s - loop.time()):
                return sorted(marked_processes(marks))
    return []


async def has_ended(pid: int, start_ticks: int, timeout_s: float | None) -> bool:
    """Whether this very process ends within the time; None: wait for as long as it takes."""
    ended = asyncio.Event()
    try:
        watch = Watch(pid, ended.set)
    except ProcessLookupError:
        return True
    try:
        if not is_running(pid, start_ticks):
            return True
        async with asyncio.timeout(None if timeout_s is None else max(timeout_s, 0)):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        watch.close()
    return True
