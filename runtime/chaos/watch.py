"""A run in processes of its own, as somebody sees it who has nothing but its folder and the kernel.

Invariants:

* What is signalled carries the run's id in its environment. On a Ray cluster that somebody else has started no process
  does; there it is a process of Ray's whose pid the run's own log has named a moment ago.
* Files are read from where the last look ended; half a line waits for its other half.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.learners.worker_group.rank_process import RANK_VARIABLE
from penstock.backends.processes.process_facts import descendants_of, environment_of, facts_of, is_running, kill
from penstock.messages.names import LEARNER
from penstock.runtime.chaos.faults import DRIVER, is_rank, rank_of
from penstock.runtime.hosts.driver.main import DRIVER_LOG
from penstock.runtime.hosts.processes.job import RUN_ID_VARIABLE
from penstock.runtime.observability.following import LineFollower
from penstock.runtime.observability.trackers import METRICS_FILE, is_evaluation_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OUTPUT_FILE: Final = "output.txt"
PENSTOCK: Final = (sys.executable, "-m", "penstock.runtime.cli")
TERM_TIMEOUT_S: Final = 45.0
"""After SIGTERM a run writes a checkpoint first."""
RAY_ADDRESS_KEY: Final = "runtime.ray_address="
_ON_A_CLUSTER: Final = b"ray::ActorProcess"
_STARTED: Final = re.compile(r"supervisor: (\S+) (\d+) is process (\d+) on node (\w+), (\S+)$")
_LOST: Final = re.compile(r"supervisor: (\S+) (\d+) is lost: (.*)$")
_SAVED: Final = re.compile(r"session: prompt_source: .*, ([\d,]+) tokens saved$")
_STAMP: Final = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


class ActorFound(msgspec.Struct, frozen=True):
    """An incarnation that announced itself."""

    name: str
    epoch: int
    pid: int
    start_ticks: int
    node: str
    endpoint: str
    unix_s: float


class ActorLoss(msgspec.Struct, frozen=True):
    """An incarnation that the supervisor gave up."""

    name: str
    epoch: int
    cause: str
    unix_s: float


class StepSeen(msgspec.Struct, frozen=True):
    """A recorded step, and when this process saw it."""

    version: int
    at_s: float
    """When the step was seen, in seconds on the run's clock."""
    seen_unix_s: float
    num_tokens: int


class _StepRow(msgspec.Struct):
    version: int
    at_s: float
    response_lengths: tuple[int, ...]


class WatchedRun:
    """One run, over as many drives as it takes. A context manager that leaves no process behind."""

    def __init__(self, parent: Path, runs: Path) -> None:
        """
        Args:
            parent: what the run prints goes here.
            runs: the run's folder is made in here, and nothing else's.
        """
        self.parent = parent
        self._runs = runs
        self.losses: list[ActorLoss] = []
        self.steps: list[StepSeen] = []
        self.num_drives = 0
        self.num_saved_tokens = 0
        """That lost engines had reported and others went on from."""
        self.exit_codes: list[int] = []
        self._environment = dict(os.environ)
        self._is_on_a_cluster = False
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._actors: dict[str, ActorFound] = {}
        self._log: LineFollower | None = None
        self._metrics: LineFollower | None = None

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """What is set for the run beside the environment of this process."""
        self._environment |= variables

    def end(self) -> None:
        """End the run as Ctrl-C does, if it still goes on."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        self.wake()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TERM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # --- drives -----------------------------------------------------------------------------------------------

    def start(self, arguments: Sequence[str]) -> None:
        """``penstock run`` with these arguments."""
        self.parent.mkdir(parents=True, exist_ok=True)
        self._is_on_a_cluster = any(argument.startswith(RAY_ADDRESS_KEY) for argument in arguments)
        self._spawn(("run", *arguments, f"run.folder={self._runs}"))

    def resume(self) -> None:
        """``penstock resume`` of a run that has ended without being complete."""
        assert self._process is not None
        assert self._process.poll() is not None
        self._actors.clear()
        self._spawn(("resume", str(self.folder)))

    def _spawn(self, arguments: Sequence[str]) -> None:
        with (self.parent / OUTPUT_FILE).open("ab") as output:
            self._process = subprocess.Popen(
                [*PENSTOCK, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the controller alone, which then ends the run
            )
        self.num_drives += 1

    def ended(self) -> int | None:
        """Exit code of the current drive; None while it goes on."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None and len(self.exit_codes) < self.num_drives:
            self.exit_codes.append(code)
        return code

    @property
    def output(self) -> str:
        """Everything that the run has printed."""
        return (self.parent / OUTPUT_FILE).read_text(errors="replace")

    # --- what its folder says ---------------------------------------------------------------------------------

    @property
    def has_folder(self) -> bool:
        """Whether its folder is there yet."""
        if self._folder is None:
            found = list(self._runs.glob("*/run.json"))
            if not found:
                return False
            [record] = found
            self._folder = record.parent
            self._log = LineFollower(self._folder / DRIVER_LOG)
            self._metrics = LineFollower(self._folder / METRICS_FILE)
        return True

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        assert self.has_folder
        assert self._folder is not None
        return self._folder

    def look(self) -> None:
        """Take in what was written since the last call."""
        if not self.has_folder:
            return
        assert self._log is not None
        assert self._metrics is not None
        for line in self._log.more():
            self._note_log(line.decode(errors="replace"))
        now_s = time.time()
        for line in self._metrics.more():
            if is_evaluation_line(line):
                continue
            row = msgspec.json.decode(line, type=_StepRow)
            self.steps.append(StepSeen(row.version, row.at_s, now_s, sum(row.response_lengths)))

    def _note_log(self, line: str) -> None:
        stamp = _STAMP.match(line)
        if stamp is None:
            return
        unix_s = datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
        if found := _STARTED.search(line):
            name, epoch, pid, node, endpoint = found.groups()
            facts = facts_of(int(pid))
            if facts is not None and self._is_of_run(int(pid)):
                self._actors[name] = ActorFound(name, int(epoch), int(pid), facts.start_ticks, node, endpoint, unix_s)
        elif found := _LOST.search(line):
            name, epoch, cause = found.groups()
            self.losses.append(ActorLoss(name, int(epoch), cause, unix_s))
        elif found := _SAVED.search(line):
            self.num_saved_tokens += int(found[1].replace(",", ""))

    @property
    def version(self) -> int:
        """The newest recorded step."""
        return max((step.version for step in self.steps), default=0)

    def step_s(self) -> float:
        """Median time of the last few steps; a second before there are any."""
        recent = deque((step.at_s for step in self.steps), maxlen=9)
        gaps = sorted(after - before for before, after in zip(recent, list(recent)[1:], strict=False))
        return gaps[len(gaps) // 2] if gaps else 1.0

    # --- its processes ----------------------------------------------------------------------------------------

    def actor(self, name: str) -> ActorFound | None:
        """The living incarnation of this name that announced itself last."""
        found = self._actors.get(name)
        return found if found is not None and is_running(found.pid, found.start_ticks) else None

    def find(self, target: str) -> tuple[int, int] | None:
        """Pid and start time of an actor, a rank or the driver; None while there is none."""
        if is_rank(target):
            return self._find_rank(rank_of(target))
        if target != DRIVER:
            found = self.actor(target)
            return None if found is None else (found.pid, found.start_ticks)
        assert self._process is not None
        for pid in descendants_of(self._process.pid):
            facts = facts_of(pid)
            if facts is not None and facts.parent == self._process.pid and self._is_of_run(pid):
                return pid, facts.start_ticks
        return None

    def _find_rank(self, rank: int) -> tuple[int, int] | None:
        learner, mark = self.actor(LEARNER), f"{RANK_VARIABLE}={rank}".encode()
        for pid in descendants_of(learner.pid) if learner is not None else ():
            facts = facts_of(pid)
            # Its guardian, which is its parent, has the mark too.
            if facts is not None and mark in environment_of(pid) and mark in environment_of(facts.parent):
                return pid, facts.start_ticks
        return None

    def signal(self, target: str, number: signal.Signals) -> tuple[int, int] | None:
        """Signal an actor, a rank or the driver; the process that was hit, or None when there is none."""
        found = self.find(target)
        return found if found is not None and kill(*found, number) else None

    def kill_all(self) -> None:
        """SIGKILL of the launcher and of everything below it."""
        assert self._process is not None
        for pid in (self._process.pid, *descendants_of(self._process.pid)):
            facts = facts_of(pid)
            if facts is not None:
                kill(pid, facts.start_ticks)

    def wake(self) -> None:
        """Continue every process of the run, so that none sleeps through its end."""
        if self._process is None:
            return
        for pid in descendants_of(self._process.pid):
            facts = facts_of(pid)
            if facts is not None and facts.state == "T":
                kill(pid, facts.start_ticks, signal.SIGCONT)

    def _is_of_run(self, pid: int) -> bool:
        if f"{RUN_ID_VARIABLE}={self.folder.name}".encode() in environment_of(pid):
            return True
        if not self._is_on_a_cluster:
            return False
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_ON_A_CLUSTER)
        except OSError:  # it has ended meanwhile
            return False
