"""``penstock run`` itself: starts the driver, passes signals on, and leaves no process behind, whoever dies.

Invariants:

* Whatever the driver and Ray start ends up below this process: it adopts orphans (child subreaper). So one walk over
  its descendants finds every process of the run, also after a SIGKILL of the driver.
* The driver lives in a session of its own, so that a signal to the terminal's group reaches Ray through nobody but
  the driver, in the right order.
* A driver whose launcher is gone learns it in two ways: its parent-death signal, and the end of its standard input.
* After a stop was asked for, everything is gone within ``stop_timeout_s`` (a checkpoint is written), ``SUM_UP_S`` and
  ``END_TIMEOUT_S``, cooperating or not; after a second signal within ``END_TIMEOUT_S``.

| waits for | who ends it |
|---|---|
| the driver's end | the driver; once a stop is asked for, its time limit, then SIGKILL |
| the end of what the driver left | SIGKILL, ``SWEEP_TIMEOUT_S`` |
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from penstock.backends.processes.process_facts import be_subreaper, is_stopped
from penstock.backends.processes.temp_folders import remove_folder
from penstock.backends.weights.segments import sweep
from penstock.messages.errors import DivergedError, UserFault
from penstock.runtime.hosts.processes.descendants import children_of, kill_descendants
from penstock.runtime.hosts.processes.job import (
    RUN_FOLDER_VARIABLE,
    RUN_ID_VARIABLE,
    STORY_PIPE_VARIABLE,
    DriverEnd,
    DriverReady,
    DriverWord,
    write_job,
)
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.hosts.processes.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.runtime.hosts.processes.job import DriverJob

END_TIMEOUT_S: Final = 4.5
SUM_UP_S: Final = 5.0
"""For summary and report, which a busy machine takes seconds for."""
SWEEP_TIMEOUT_S: Final = 2.0
NO_BYTECODE_VARIABLE: Final = "PYTHONDONTWRITEBYTECODE"
DRIVER_COMMAND: Final = (sys.executable, "-m", "penstock.runtime.hosts.driver.main")


def run_job(job: DriverJob, console: Console) -> DriverEnd:
    """Drive a run until it has ended.

    Args:
        job: the run.
        console: the terminal, on which the driver draws.

    Raises:
        UserFault: something that the user gave cannot be used.
        DivergedError: the training has diverged.
    """
    end = launch(job)
    if console.is_terminal:
        console.show_cursor()  # a view that was killed has hidden it
    if end.kind is OutcomeKind.USER_ERROR:
        raise UserFault(end.story)
    if end.kind is OutcomeKind.DIVERGED:
        raise DivergedError(end.story)
    return end


def launch(job: DriverJob, *, command: Sequence[str] = DRIVER_COMMAND) -> DriverEnd:
    """Run the driver to its end, then clear away whatever it left.

    Args:
        job: what the driver is to do; its ``temp_folder`` is removed at the end.
        command: what starts the driver.
    """
    others = children_of(os.getpid())
    be_subreaper()
    with Signals() as signals, _Driver(job, command) as driver:
        end = driver.wait(signals)
    kill_descendants(timeout_s=SWEEP_TIMEOUT_S, spare=others)
    be_subreaper(on=False)
    remove_folder(Path(job.temp_folder))
    sweep(job.run_id)
    return end


def _inherited_environment() -> dict[str, str]:
    """What every process of the run inherits.

    Each of the ten and more imports the same modules, and where bytecode may not be written each compiles them anew, at
    every start and replacement. Python writes it beside the source, or below ``PYTHONPYCACHEPREFIX`` where that is
    set; where it may not write, it goes without and says nothing.
    """
    return {name: value for name, value in os.environ.items() if name != NO_BYTECODE_VARIABLE}


class _Driver:
    """The driver's process, as the launcher sees it."""

    def __init__(self, job: DriverJob, command: Sequence[str]) -> None:
        self._job = job
        self._command = command
        self._is_ready = False
        self._end: DriverEnd | None = None
        self._unread = b""
        self._asked: signal.Signals | None = None
        self._deadline_s = float("inf")

    def __enter__(self) -> _Driver:
        self._story, story_writer = os.pipe()
        os.set_blocking(self._story, False)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(story_writer,),
            env=_inherited_environment()
            | {
                RUN_ID_VARIABLE: self._job.run_id,
                RUN_FOLDER_VARIABLE: self._job.run_folder,
                STORY_PIPE_VARIABLE: str(story_writer),
            },
        )
        os.close(story_writer)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; what it says about that comes through ``wait``
            write_job(self._process.stdin.fileno(), self._job)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._story)

    def wait(self, signals: Signals) -> DriverEnd:
        poller = zmq.Poller()
        poller.register(signals.fileno(), zmq.POLLIN)
        poller.register(self._story, zmq.POLLIN)
        handle = os.pidfd_open(self._process.pid)
        poller.register(handle, zmq.POLLIN)
        try:
            while self._process.poll() is None:
                poller.poll(200)
                self._read()
                for number in signals.take():
                    self._pass_on(number)
                if time.monotonic() > self._deadline_s:
                    self._process.kill()
        finally:
            os.close(handle)
        self._read()
        return self._end or self._story_of_death(self._process.returncode)

    def _pass_on(self, number: signal.Signals) -> None:
        limit_s = END_TIMEOUT_S
        if self._asked is None:
            self._asked = number
            if not is_stopped(self._process.pid):
                limit_s += self._job.scenario.runtime.stop_timeout_s + SUM_UP_S
        self._deadline_s = min(self._deadline_s, time.monotonic() + limit_s)
        if self._is_ready:
            self._process.send_signal(number)
        else:
            self._process.kill()  # nothing runs yet that deserves a goodbye, and Ray's start takes seconds

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._story, 65536):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            word = msgspec.json.decode(line, type=DriverWord)
            if isinstance(word, DriverReady):
                self._is_ready = True
            else:
                self._end = word

    def _story_of_death(self, code: int) -> DriverEnd:
        if self._asked is not None:
            story, exit_code = f"stopped by {self._asked.name}", 128 + self._asked
            return DriverEnd(kind=OutcomeKind.STOPPED, story=story, exit_code=exit_code)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return DriverEnd(
            kind=OutcomeKind.FAILED,
            story=f"the driver {how}; {self._job.run_folder}/logs/driver.log may say why",
            exit_code=128 - code if code < 0 else 1,
        )
