"""Ends the process of an actor with all that it has started on this machine, and waits until nothing of that is left.

What an actor has started is what its environment marks, and what is below that. A process that is ending shows no
environment any more, and may hold its device for seconds: it is waited for as a child of who keeps it, its guardian.

| wait | ends with | at the latest |
|---|---|---|
| for what ends by itself, as a guardian with all that it keeps | its end | ``GRACE_S``, then SIGKILL |
| for what was killed | its end | ``END_TIMEOUT_S``, then whoever is left is told |
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.processes import has_ended
from penstock.backends.processes.process_facts import descendants_of, facts_of, is_running, kill, marked_processes
from penstock.runtime.hosts.processes.endings import END_TIMEOUT_S
from penstock.runtime.hosts.processes.job import ACTOR_VARIABLE, run_variables
from penstock.runtime.hosts.processes.left_behind import marks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.runtime.hosts.processes.boot import Boot

GRACE_S: Final = 2.0

Marks = list[list[bytes]]
"""A process is meant that has every ``NAME=value`` of one of these in its environment."""


def marks_of_actor(name: str, boot: Boot) -> Marks:
    """What is in the environment of processes that an actor has started, and of the servers of an engine.

    Args:
        name: of the actor.
        boot: of any actor of its run.
    """
    variables = {ACTOR_VARIABLE: name, **run_variables(boot.run_id, boot.run_folder)}
    return [[f"{key}={value}".encode() for key, value in variables.items()], marks_of(name, boot)]


def end_whole_here(process: tuple[int, int] | None, marks: Marks) -> Future[list[int]]:
    """As :func:`end_whole`, on a thread of its own; returns at once."""
    told: Future[list[int]] = Future()
    threading.Thread(target=lambda: told.set_result(end_whole(process, marks)), name="end-whole", daemon=True).start()
    return told


def end_whole(process: tuple[int, int] | None, marks: Marks, timeout_s: float = END_TIMEOUT_S) -> list[int]:
    """Kill a process of this machine, and have everything end that it has started here; waits for that.

    Args:
        process: pid and start time of the actor's own; None: it is on another machine.
        marks: of what it has started.
        timeout_s: how long to try.

    Returns:
        Processes that are still there after the time, which should be none.
    """
    return asyncio.run(_end(process, marks, timeout_s))


async def _end(process: tuple[int, int] | None, marks: Marks, timeout_s: float) -> list[int]:
    loop = asyncio.get_running_loop()
    grace_ends_s, deadline_s = loop.time() + min(GRACE_S, timeout_s / 2), loop.time() + timeout_s
    own = [process] if process is not None and is_running(*process) else []
    found = _with_descendants([pid for pid, _ in own]) | _marked(marks)  # before its end, which hides what is below it
    for pid, start_ticks in own:
        kill(pid, start_ticks)
    while found:  # until a whole look finds nobody: some may just have been started
        for pid, start_ticks in found.items():
            if not await has_ended(pid, start_ticks, grace_ends_s - loop.time()):
                kill(pid, start_ticks)
        for pid, start_ticks in found.items():
            if not await has_ended(pid, start_ticks, deadline_s - loop.time()):
                return sorted(pid for pid, start_ticks in found.items() if is_running(pid, start_ticks))
        found = _marked(marks)
    return []


def _marked(marks: Marks) -> dict[int, int]:
    return _with_descendants(pid for each in marks for pid in marked_processes(each))


def _with_descendants(pids: Iterable[int]) -> dict[int, int]:
    """These and all below them that have not ended: pid and start time."""
    whole = {each for pid in pids for each in (pid, *descendants_of(pid))}
    known = ((pid, facts_of(pid)) for pid in whole)
    return {pid: facts.start_ticks for pid, facts in known if facts is not None and facts.state not in "ZX"}
