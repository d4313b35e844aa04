"""Processes below this one, and what it holds.

Linux only: this reads ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.processes.process_facts import descendants_of, facts_of

if TYPE_CHECKING:
    from collections.abc import Collection

TASKS: Final = "/proc/self/task"
"""A folder for each thread of this process."""


def resident_bytes() -> int:
    """Memory that this process holds, what it shares with others included."""
    pages = Path("/proc/self/statm").read_bytes().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def core_wait_s() -> float:
    """Seconds in which threads of this process could have run and no core was free; of those that have ended nothing is
    known, and where the kernel keeps no schedstat it is 0."""
    waited_ns = 0
    for thread in os.listdir(TASKS):  # each second, of dozens of threads: paths as objects take twice as long
        try:
            file = os.open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY)
        except FileNotFoundError:  # it has ended meanwhile, or nothing is kept
            continue
        try:
            waited_ns += int(os.read(file, 256).split()[1])
        except ProcessLookupError:
            continue
        finally:
            os.close(file)
    return waited_ns / 1e9


def kill_descendants(*, timeout_s: float, spare: Collection[int] = ()) -> list[int]:
    """Kill every descendant of this process, and reap those that are its own children, until none is left.

    A child subreaper adopts what its descendants leave behind, so for one this ends everything it ever started.

    Args:
        timeout_s: how long to try.
        spare: children that are left alone, with all that they have started.

    Returns:
        What is left after the time, which should be nothing.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        spared = {pid for child in spare for pid in (child, *descendants_of(child))}
        found = [(pid, facts_of(pid)) for pid in descendants_of(os.getpid()) if pid not in spared]
        alive = [pid for pid, facts in found if facts is not None and facts.state != "Z"]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid, facts in found:
            if facts is not None and facts.parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if not alive or time.monotonic() > deadline_s:
            return alive
        time.sleep(0.005)


def children_of(pid: int) -> list[int]:
    """Its own children."""
    return [child for child in descendants_of(pid) if (facts := facts_of(child)) is not None and facts.parent == pid]
