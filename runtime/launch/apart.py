"""A run in a process of its own, for a program that goes on meanwhile: a script, a notebook.

Invariants:

* That process does all that ``penstock run`` does in its own: it holds the run's lock, hears signals, adopts what the
  run leaves behind. So the program's own processes, signals and threads are left alone, and ``penstock stop`` and
  ``status`` know the run as any other.
* It leads a session of its own, so a Ctrl-C at the program reaches nobody but the program.
* It ends, as after SIGTERM, when the program is gone, however that ended. (Its standard input ends then.)
* Nothing that it says waits for anybody to read it: its words go to files in memory.

| waits for | who ends it |
|---|---|
| the end of the process | the process; whoever stops it |
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.processes.process_facts import await_exit, how_it_ended
from penstock.messages.base import Value
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.local.wire import content_of, memory_file
from penstock.runtime.scenario import Scenario

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.runtime.launch.launch import Ended

STDIN: Final = 0
TERMINAL_VARIABLES: Final = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""By which a notebook's kernel makes programs draw as on a terminal."""
MAX_LINE_BYTES: Final = 1 << 12


class LaunchJob(Value, frozen=True, kw_only=True, tag=True):
    """As ``penstock run``."""

    scenario: Scenario
    """Resolved."""
    folder: str
    """Absolute, and there; as of the others."""


class ResumeJob(Value, frozen=True, kw_only=True, tag=True):
    """As ``penstock resume``."""

    overrides: tuple[str, ...]
    folder: str


class EvaluateJob(Value, frozen=True, kw_only=True, tag=True):
    """As ``penstock evaluate``."""

    model: str
    scenario_file: str | None
    overrides: tuple[str, ...]
    version: int | None
    data: tuple[str, ...]
    """``PATH`` or ``NAME=PATH``."""
    settings: dict[str, Any]
    """Settings of every dataset, as plain data."""
    folder: str


Job = LaunchJob | ResumeJob | EvaluateJob


class JobEnd(Value, frozen=True):
    """How the run ended, in the process's own words."""

    exit_code: int
    story: str


class RunApart:
    """The process, as the program sees it."""

    def __init__(self, job: Job) -> None:
        """Starts it."""
        given = memory_file(msgspec.msgpack.encode(job))
        self._answer, self._console = memory_file(), memory_file()
        environment = {name: value for name, value in os.environ.items() if name not in TERMINAL_VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.runtime.launch.apart", str(given), str(self._answer), *sys.argv],
            stdin=subprocess.PIPE,
            stdout=self._console,
            stderr=self._console,
            pass_fds=(given, self._answer),
            start_new_session=True,
            env=environment,
        )
        os.close(given)
        self._handle = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Of the process, which is the one that drives the run."""
        return self._process.pid

    def has_ended(self, timeout_s: float) -> bool:
        """Whether it ends within this time."""
        return bool(self._process.returncode is not None or await_exit(self._handle, timeout_s))

    def newest_line(self) -> str:
        """The last line that it has printed."""
        size = os.fstat(self._console).st_size
        data = os.pread(self._console, MAX_LINE_BYTES, max(0, size - MAX_LINE_BYTES))
        lines = data.decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        self._process.send_signal(number)

    def end(self) -> JobEnd:
        """Its last word. Call it once the process has ended."""
        code = self._process.wait()
        if word := content_of(self._answer):
            return msgspec.msgpack.decode(word, type=JobEnd)
        return JobEnd(128 - code if code < 0 else 1, f"its process {how_it_ended(code)}; it said: {self.newest_line()}")


def main() -> None:
    """Arguments: descriptors of the job and of the file for the last word; then the program's own, for people."""
    given, answer = map(int, sys.argv[1:3])
    sys.argv = sys.argv[3:]
    for descriptor in (given, answer):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that the record is closed
    threading.Thread(target=_follow_program, daemon=True).start()
    from penstock.runtime.terminal import TerminalConsole

    job: Job = msgspec.msgpack.decode(content_of(given), type=Job)
    try:
        ended = _do(job, TerminalConsole())
        end = JobEnd(ended.exit_code, ended.story)
    except UserFault as error:
        end = JobEnd(2, str(error))
    except KeyboardInterrupt:
        end = JobEnd(128 + signal.SIGTERM, "stopped before it began")
    os.write(answer, msgspec.msgpack.encode(end))
    sys.exit(end.exit_code)


def _follow_program() -> None:
    while os.read(STDIN, 1):
        pass  # nothing is sent
    os.kill(os.getpid(), signal.SIGTERM)


def _do(job: Job, console: Console) -> Ended:
    match job:
        case LaunchJob():
            from penstock.runtime.launch.launch import launch

            return launch(job.scenario, None, console, folder=Path(job.folder))
        case ResumeJob():
            from penstock.runtime.launch.resume import resume

            return resume(Path(job.folder), job.overrides, console)
        case EvaluateJob():
            from penstock.runtime.launch.evaluate import Asked, evaluate, plan_evaluation

            plan = plan_evaluation(
                Path(job.model),
                None if job.scenario_file is None else Path(job.scenario_file),
                job.overrides,
                console,
                asked=Asked(job.data, (), job.settings),
                version=job.version,
            )
            return evaluate(plan, console, folder=Path(job.folder))


if __name__ == "__main__":
    # Under its own name, so that what is decoded is of the classes that others import.
    from penstock.runtime.launch.apart import main as main_by_name

    main_by_name()
