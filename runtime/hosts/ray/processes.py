"""Processes of this machine, by what the kernel says about them.

Invariants:

* A process is a pid *and* its start time. A pid that was given away since is never signalled.
* Linux only: this reads ``/proc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")


class ProcessFacts(NamedTuple):
    """One line of ``/proc``."""

    state: str
    """``R``, ``S``, ``D``, ``T`` (stopped), ``Z`` (ended, not reaped), …"""
    parent: int
    start_ticks: int
    """Start time in clock ticks since the machine started."""


def facts_of(pid: int) -> ProcessFacts | None:
    """What the kernel knows about a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return ProcessFacts(fields[0], int(fields[1]), int(fields[19]))


def environment_of(pid: int) -> list[bytes]:
    """``NAME=value`` of each variable that a process began with; nothing when it has ended or is somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def start_ticks_of(pid: int) -> int:
    """Start time of a process that is there.

    Raises:
        ProcessLookupError: it is not.
    """
    facts = facts_of(pid)
    if facts is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return facts.start_ticks


def resident_bytes() -> int:
    """Memory that this process holds, what it shares with others included."""
    pages = Path("/proc/self/statm").read_bytes().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether this very process exists and has not ended."""
    facts = facts_of(pid)
    return facts is not None and facts.start_ticks == start_ticks and facts.state not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process (SIGSTOP, Ctrl-Z)."""
    facts = facts_of(pid)
    return facts is not None and facts.state == "T"


def kill(pid: int, start_ticks: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal this very process; False when it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The handle pins the process, so what is checked now stays true until the signal.
        if not is_running(pid, start_ticks):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on; parents before children. Includes those that ended and are not reaped."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (facts := facts_of(int(entry))) is not None:
            children.setdefault(facts.parent, []).append(int(entry))
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found.extend(front)
    return found


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


def be_subreaper(*, on: bool = True) -> None:
    """Whether orphans among this process's descendants become its children, from here on."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(on))


def end_with_parent(number: signal.Signals) -> None:
    """The kernel sends this signal when the thread that started this process ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
