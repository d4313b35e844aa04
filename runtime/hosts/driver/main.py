"""The driver: the process that starts Ray and supervises one run.

Invariants:

* The terminal belongs to the view and to the story. Whatever Ray or a library prints goes to ``logs/driver.log``.
* Nothing of Ray is left when the summary is shown: embedded Ray is ended first, which takes a tenth of a second.
* The process ends through ``os._exit``. Ray's own way out waits for processes that are gone already.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.processes.process_facts import be_subreaper, end_with_parent
from penstock.backends.processes.temp_folders import join_folder, remove_folder
from penstock.messages.errors import DISK_FULL_STORY, UserFault, is_disk_full
from penstock.runtime.hosts.processes.descendants import kill_descendants
from penstock.runtime.hosts.processes.job import (
    STORY_PIPE_VARIABLE,
    DriverEnd,
    DriverJob,
    DriverReady,
    DriverWord,
    read_job,
)
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.observability.live import LiveView
from penstock.runtime.safe_text import log_to_stderr

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from rich.console import Console

    from penstock.runtime.hosts.processes.ports import Outcome

DRIVER_LOG: Final = "logs/driver.log"
STDIN: Final = 0
LEFTOVERS_S: Final = 2.0

_log: Final = logging.getLogger(__name__)


def main() -> None:
    """The driver's process; never returns."""
    job = read_job(STDIN)
    join_folder(Path(job.temp_folder))  # it lives on for a moment when the launcher is killed
    signal.signal(signal.SIGTERM, _end_at_once(job))  # until Ray is up and the supervisor takes over
    end_with_parent(signal.SIGTERM)
    be_subreaper()
    story_pipe = int(os.environ[STORY_PIPE_VARIABLE])
    os.set_inheritable(story_pipe, False)
    terminal = _take_terminal(Path(job.run_folder) / DRIVER_LOG)
    say = _Speaker(story_pipe)
    exit_code = 1
    try:
        end = _drive(job, terminal, say)
        say(end)
        exit_code = end.exit_code
    except Exception:  # the edge of the process: the launcher tells where the story is
        _log.exception("the driver failed")
    finally:  # also when Ray's own handler of SIGTERM has raised SystemExit
        terminal.file.flush()
        logging.shutdown()
        os._exit(exit_code)


def _end_at_once(job: DriverJob) -> Callable[[int, FrameType | None], None]:
    """A handler for a driver whose actors do not run yet: nothing deserves a goodbye."""

    def end(number: int, frame: FrameType | None) -> None:
        kill_descendants(timeout_s=LEFTOVERS_S)
        remove_folder(Path(job.temp_folder))
        os._exit(128 + number)

    return end


class _Speaker:
    """Tells the launcher."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, word: DriverWord) -> None:
        os.write(self._descriptor, msgspec.json.encode(word) + b"\n")


def _take_terminal(log: Path) -> Console:
    """A console on what was standard output; the descriptors 1 and 2 go to the log from here on."""
    from penstock.runtime.observability.terminal import DetachedConsole

    log.parent.mkdir(parents=True, exist_ok=True)
    console = DetachedConsole(os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8"))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    log_to_stderr()
    return console


def _drive(job: DriverJob, terminal: Console, say: _Speaker) -> DriverEnd:
    _log.info("run %s of %s", job.run_id, job.scenario_path)
    options = job.scenario.run
    with LiveView(options.name, options.num_steps, terminal) as view:
        # On a terminal the view redirects these two to itself; what libraries print is for the log.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        view.phase("starting")
        from penstock.runtime.hosts.driver.session import Session

        started_s = time.monotonic()
        try:
            outcome = Session(job, view, on_ready=lambda: say(DriverReady())).run()
        except UserFault as error:
            return DriverEnd(kind=OutcomeKind.USER_ERROR, story=str(error), exit_code=2)
        except OSError as error:
            if not is_disk_full(error):
                raise
            return DriverEnd(kind=OutcomeKind.FAILED, story=f"{DISK_FULL_STORY} ({error})", exit_code=1)
        _log.info("the run took %.1f s", time.monotonic() - started_s)
        return DriverEnd(kind=outcome.kind, story=outcome.story, exit_code=exit_code_of(outcome))


def exit_code_of(outcome: Outcome) -> int:
    """What the shell is told."""
    match outcome.kind:
        case OutcomeKind.COMPLETED:
            return 0
        case OutcomeKind.STOPPED:
            return 128 + (outcome.signal or signal.SIGTERM)
        case OutcomeKind.USER_ERROR | OutcomeKind.DIVERGED:
            return 2
        case OutcomeKind.FAILED | OutcomeKind.ABANDONED:
            return 1


if __name__ == "__main__":
    main()
