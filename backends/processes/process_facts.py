"""Processes of this machine, by what the kernel says about them.

Invariants:

* A process is a pid *and* its start time. A pid that was given away since is never signalled.
* Linux only: this reads ``/proc``.
* Nothing but the standard library is imported: :mod:`penstock.backends.processes.guardian` runs without any other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")
_NO_PROCESS: Final = frozenset((errno.ESRCH, errno.EINVAL, errno.ENOENT))
"""What kernels say of a number that nobody has; the last two, of one that a thread has meanwhile."""


class ProcessFacts(NamedTuple):
    """One line of ``/proc``."""

    state: str
    """``R``, ``S``, ``D``, ``T`` (stopped), ``Z`` (ended, not reaped), …"""
    parent: int
    start_ticks: int
    """Start time in clock ticks since the machine started."""
    wait_status: int = 0
    """Of one that has ended and is not reaped; see ``os.waitstatus_to_exitcode``."""


def facts_of(pid: int) -> ProcessFacts | None:
    """What the kernel knows about a process; None when there is none."""
    try:
        # The kernel cuts a name in the midst of a character.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return ProcessFacts(fields[0], int(fields[1]), int(fields[19]), int(fields[49]))


def environment_of(pid: int) -> list[bytes]:
    """``NAME=value`` of each variable that a process began with; nothing when it has ended or is somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def title_of(pid: int) -> str:
    """The first word of the command line, which a process may have set to a title; empty when it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return command.partition(b"\0")[0].decode(errors="replace").strip()


def how_it_ended(exit_code: int | None) -> str:
    """``was killed by SIGKILL``, ``ended with exit code 1``; None: nobody knows."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def start_ticks_of(pid: int) -> int:
    """Start time of a process that is there.

    Raises:
        ProcessLookupError: it is not.
    """
    facts = facts_of(pid)
    if facts is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return facts.start_ticks


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
    with pinned(pid, start_ticks) as handle:
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
    return True


@contextmanager
def pinned(pid: int, start_ticks: int) -> Generator[int | None]:
    """A pidfd of this very process, which turns readable when it ends; None when it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        yield None
        return
    try:
        # The handle keeps the pid from meaning another process, so what is checked now stays true.
        yield handle if is_running(pid, start_ticks) else None
    finally:
        os.close(handle)


def await_exit(handle: int, timeout_s: float) -> bool:
    """Whether the process of this pidfd ends within this time; also when nobody has reaped it yet."""
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    return bool(ended.poll(timeout_s * 1000))


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on; parents before children. Includes those that ended and are not reaped."""
    children: dict[int, list[int]] = {}
    for other in all_pids():
        if (facts := facts_of(other)) is not None:
            children.setdefault(facts.parent, []).append(other)
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found.extend(front)
    return found


def all_pids() -> list[int]:
    """Every process that this one can see."""
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]


def marked_processes(marks: Collection[bytes]) -> dict[int, int]:
    """The living processes whose environment has every one of these ``NAME=value``: pid and start time."""
    found: dict[int, int] = {}
    for pid in all_pids():
        if pid == os.getpid() or not set(marks) <= set(environment_of(pid)):
            continue
        facts = facts_of(pid)
        if facts is not None and facts.state not in "ZX":
            found[pid] = facts.start_ticks
    return found


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
