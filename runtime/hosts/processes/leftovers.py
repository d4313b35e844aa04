"""What a run leaves on this machine when all who could have cleared up were killed, and its removal.

Invariants:

* A process belongs to a run when its environment names the run's id *and* its folder, or when such a process has
  started it. Nothing else is ever killed.
* A pid that was given to another process meanwhile is not signalled.
* Weights in shared memory are known by the run's id alone. While a run of this id goes on in another folder, as that
  which this one is a copy of may, none are removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from penstock.backends.processes.process_facts import environment_of, facts_of, is_running, kill
from penstock.backends.processes.temp_folders import TEMP_PREFIX
from penstock.backends.weights.segments import sweep
from penstock.runtime.hosts.processes.job import RUN_FOLDER_VARIABLE, RUN_ID_VARIABLE

END_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 0.01


def processes_of(run_id: str, run_folder: Path) -> dict[int, int]:
    """The living processes of a run on this machine but its launcher: pid and start time."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    living = {pid: facts for pid in pids if (facts := facts_of(pid)) is not None and facts.state not in "ZX"}
    front = {pid for pid in living if _is_member(pid, run_id, run_folder)}
    found = set(front)
    while front:  # what one of them has started with an environment of its own belongs to the run as well
        front = {pid for pid, facts in living.items() if facts.parent in front and pid not in found}
        found |= front
    return {pid: living[pid].start_ticks for pid in found}


def end_process(pid: int, start_ticks: int, timeout_s: float = END_TIMEOUT_S) -> bool:
    """Kill this very process and wait until it is gone; False when it is still there after the time."""
    kill(pid, start_ticks)
    deadline_s = time.monotonic() + timeout_s
    while is_running(pid, start_ticks):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(PAUSE_S)
    return True


def clear_leftovers(
    run_id: str, run_folder: Path, temp_folder: str = "", timeout_s: float = END_TIMEOUT_S
) -> tuple[int, list[int]]:
    """Kill what is left of a run, and remove its weights from shared memory and the temporary folder of its Ray.

    Args:
        run_id: of the run.
        run_folder: absolute.
        temp_folder: as the drive noted it; nothing else than what ``make_temp_folder`` makes is removed.
        timeout_s: how long to try.

    Returns:
        How many processes were killed, and those that are still there, which should be none.
    """
    killed: set[tuple[int, int]] = set()
    deadline_s = time.monotonic() + timeout_s
    while left := processes_of(run_id, run_folder):  # until a whole look finds nobody: some may just have been started
        if time.monotonic() > deadline_s:
            return len(killed), sorted(left)
        for pid, start_ticks in left.items():
            if kill(pid, start_ticks):
                killed.add((pid, start_ticks))
        time.sleep(PAUSE_S)
    if not any(_folders_of(int(entry), run_id) for entry in os.listdir("/proc") if entry.isdigit()):
        sweep(run_id)
    temp = Path(temp_folder)
    if temp.name.startswith(TEMP_PREFIX) and temp.parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        shutil.rmtree(temp, ignore_errors=True)
    return len(killed), []


def _is_member(pid: int, run_id: str, run_folder: Path) -> bool:
    return os.path.realpath(run_folder) in _folders_of(pid, run_id)


def _folders_of(pid: int, run_id: str) -> list[str]:
    """The folder of the run of this id that a process belongs to, if it does to one."""
    variables = environment_of(pid)
    if f"{RUN_ID_VARIABLE}={run_id}".encode() not in variables:
        return []
    mark = f"{RUN_FOLDER_VARIABLE}=".encode()
    folders = [variable.removeprefix(mark) for variable in variables if variable.startswith(mark)]
    return [os.path.realpath(os.fsdecode(folder)) for folder in folders]
