"""``penstock run`` with echo actors as a process of its own, which a test can watch and interfere with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.processes.process_facts import facts_of
from penstock.runtime.hosts.processes.job import RUN_ID_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from host_echo import RunPlan

HERE = Path(__file__).parent
START_DEADLINE_S = 90.0
END_DEADLINE_S = 90.0


class Launched:
    """``penstock run`` with echo actors, in a process of its own."""

    def __init__(self, folder: Path, plan: RunPlan, scenario: str) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "host_launch.py"), str(folder), msgspec.json.encode(plan).decode(), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.temp_folder = Path(self.process.stdout.readline().strip())

    def members(self) -> dict[int, str]:
        """Every living process of this run but the launcher: pid and command line."""
        mark = f"{RUN_ID_VARIABLE}={self.folder.name}".encode()
        found: dict[int, str] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and mark in environment_of(int(entry)).split(b"\0"):
                facts = facts_of(int(entry))
                if facts is not None and facts.state not in "ZX":
                    found[int(entry)] = _read(f"/proc/{entry}/cmdline").replace(b"\0", b" ").decode()
        return found

    def pid_of(self, what: str) -> int:
        [pid] = [pid for pid, command in self.members().items() if what in command.split(" --")[0]]
        return pid

    def wait_for_steps(self, *, more: int = 4) -> None:
        """Until so many more steps are recorded."""
        wanted = self._num_steps() + more
        self._until(lambda: self._num_steps() >= wanted, START_DEADLINE_S)

    def _num_steps(self) -> int:
        return _read(str(self.folder / "metrics.jsonl")).count(b"\n")

    def wait_for_member(self, what: str) -> None:
        self._until(lambda: any(what in command for command in self.members().values()), START_DEADLINE_S)

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once it has ended by itself."""
        _, stderr = self.process.communicate(timeout=END_DEADLINE_S)
        return self.process.returncode, stderr

    def assert_nothing_is_left(self) -> None:
        assert self.members() == {}
        assert not self.temp_folder.exists()
        assert not [name for name in os.listdir("/dev/shm") if self.folder.name in name]

    def _until(self, what: Callable[[], bool], deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not what():
            assert self.process.poll() is None, f"it has ended: {self.process.communicate()}"
            assert time.monotonic() < end_s, "waited in vain"
            time.sleep(0.02)


def environment_of(pid: int) -> bytes:
    """As ``NAME=value``, each ended by a zero byte; empty if nothing can be read of it."""
    return _read(f"/proc/{pid}/environ")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it ended meanwhile, or belongs to somebody else
        return b""
