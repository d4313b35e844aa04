"""A run as a Python program holds it: begun here or opened from its folder, alive or over.

| waits for | who ends it |
|---|---|
| the start of a run: its checks, then its record | the run's process |
| the end of a run, in ``wait`` and ``steps`` | the run; ``timeout_s``; an interrupt, after which the run goes on |
| the end of a run that is stopped | the run; ``timeout_s`` |
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from penstock.messages.errors import RunFailedError, UserFault
from penstock.runtime.launch.apart import RunApart
from penstock.runtime.launch.control import Told
from penstock.runtime.launch.inputs import as_given
from penstock.runtime.launch.launch import what_is_left
from penstock.runtime.launch.progress import Progress, RunPicture
from penstock.runtime.launch.runs import (
    RECORD_NAME,
    SCENARIO_NAME,
    has_ended,
    make_run_folder,
    model_folder,
    read_record,
    stop_run,
)
from penstock.runtime.launch.status import run_status
from penstock.runtime.observability.accounting import read_accounts
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.following import StepFollower
from penstock.runtime.observability.samples import chosen_samples, shown_samples
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.traces import read_step, read_trace
from penstock.runtime.observability.trackers import read_activity, read_steps
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from penstock.runtime.launch.apart import Job
    from penstock.runtime.launch.status import RunStatus
    from penstock.runtime.observability.accounting import Accounts
    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.samples import ShownSample
    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.traces import SpanRow
    from penstock.runtime.observability.trackers import ActivityRow, StepRow
    from penstock.runtime.scenario import Scenario

LOOK_EVERY_S: Final = 0.5
STOP_TIMEOUT_S: Final = 60.0
USER_HAS_TO_CHANGE: Final = 2
"""As exit code: something that was given cannot be used."""

_APART: Final[dict[Path, RunApart]] = {}
"""The newest process of each run that this program has begun. It is held here, as the run ends with it."""


class Run(Told):
    """A run and its folder. Everything but ``folder`` is read anew each time it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        """
        Raises:
            UserFault: the folder holds no run.
        """
        self.folder = Path(folder).expanduser().absolute()
        read_record(self.folder)

    def __repr__(self) -> str:
        return f"<Run {self.folder.name}: {self.status.state}>"

    def _repr_html_(self) -> str:
        return RunPicture(self.folder).html()

    @property
    def status(self) -> RunStatus:
        """Whether it is alive, how far it is, how it ended."""
        return run_status(self.folder)

    @property
    def scenario(self) -> Scenario:
        """As it was resolved, with what was changed when it was resumed."""
        return load_scenario(self.folder / SCENARIO_NAME)

    @property
    def summary(self) -> RunSummary | None:
        """What the last drive came to; None while it goes on, and of one that was cut off."""
        return read_summary(self.folder)

    def checkpoint(self, version: int | None = None) -> Path:
        """The folder of the newest checkpoint, or of that of a version, which ``from_pretrained`` loads.

        Raises:
            UserFault: there is none.
        """
        return model_folder(self.folder, version)

    # --- while it goes on -------------------------------------------------------------------------------------

    def wait(self, *, timeout_s: float | None = None, progress: bool = True) -> Self:
        """Wait for its end. An interrupt ends the waiting, and the run goes on.

        Args:
            timeout_s: for so long at most.
            progress: show how far it is, on standard error or in the notebook's cell.

        Raises:
            UserFault: it has ended because something has to be changed.
            RunFailedError: it has failed, or its process was killed.
            TimeoutError: it goes on.
        """
        with Progress(RunPicture(self.folder, self._newest_line), is_shown=progress) as shown:
            _await_end(self.folder, shown, timeout_s)
        return self

    def steps(self) -> Iterator[StepRow]:
        """Its steps, each as soon as it is recorded, until the run has ended; of one that has, all of them."""
        follower = StepFollower(self.folder)
        while True:
            is_over = _is_over(self.folder)  # asked first, so that the last steps are read
            yield from follower.more()
            if is_over:
                return
            _is_over(self.folder, LOOK_EVERY_S)

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> Self:
        """End it cleanly, as Ctrl-C ends ``penstock run``: a checkpoint is written first. ``resume`` goes on with it.

        Raises:
            TimeoutError: it is still there.
            UserFault: the folder is a copy of a run that goes on.
        """
        record = read_record(self.folder)
        if record.state == "running" and not stop_run(self.folder, record, timeout_s):
            raise TimeoutError(f"{self.folder}: process {record.pid} is still there after {timeout_s:g} s")
        if apart := _apart_of(self.folder):
            apart.end()
        return self

    # --- what it has written ----------------------------------------------------------------------------------

    def figures(self) -> dict[str, list[float | None]]:
        """Its figures as columns of equal length, a row for each step, as ``pandas.DataFrame`` and others take them:
        ``version``, ``at_s`` (seconds since the run began), ``training_s``, ``tokens_generated``, and every metric by
        its name; None where a step has none."""
        rows = read_steps(self.folder)
        columns: dict[str, list[float | None]] = {
            "version": [row.version for row in rows],
            "at_s": [row.at_s for row in rows],
            "training_s": [row.training_s for row in rows],
            "tokens_generated": [row.tokens_generated for row in rows],
        }
        for name in dict.fromkeys(name for row in rows for name in row.metrics):
            columns[name] = [row.metrics.get(name) for row in rows]
        return columns

    def evaluations(self) -> list[EvaluationRow]:
        """Its evaluations, oldest first; ``.datasets()`` has the figures of each."""
        return read_evaluations(self.folder)

    def samples(
        self,
        *,
        step: int | None = None,
        failed: bool = False,
        dropped: bool = False,
        worst: bool = False,
        grep: str = "",
    ) -> Iterator[ShownSample]:
        """The samples that are kept (``observability.samples``), newest first: prompt, response, reward, and what came
        of it.

        Args:
            step: only those that this step trained.
            failed: only those that failed.
            dropped: only those filtered, stale or cancelled.
            worst: the lowest rewards first.
            grep: only those with this text in prompt, response, label or reason.
        """
        every = shown_samples(self.folder)
        yield from chosen_samples(every, step=step, failed=failed, dropped=dropped, worst=worst, grep=grep)

    def trace(self, group_id: int, index: int) -> list[SpanRow]:
        """The spans of a sample's life, of one that is traced (``observability.trace_fraction``).

        Raises:
            UserFault: nothing is written of it.
        """
        return read_trace(self.folder, group_id, index)

    def step_trace(self, version: int) -> list[SpanRow]:
        """The spans of the step that made this version; as :meth:`trace`."""
        return read_step(self.folder, version)

    def lanes(self) -> dict[str, list[ActivityRow]]:
        """What the learner, each engine and the Scorer's workers spent their time on: spans that tile it, by actor."""
        return read_activity(self.folder)

    def accounts(self) -> Accounts:
        """Where the time and the tokens went, without remainder; of a run that goes on, up to now.

        Raises:
            UserFault: a file of the run is damaged; the message names it.
        """
        return read_accounts(self.folder)

    # --- inside -----------------------------------------------------------------------------------------------

    def _newest_line(self) -> str:
        apart = _apart_of(self.folder)
        return "running" if apart is None else apart.newest_line()


def begin(job: Job, *, wait: bool, progress: bool) -> Run:
    """Begin what the job says. Returns once its checks are done and the run goes on or, with ``wait``, is over.

    An interrupt stops the run cleanly, and is raised again.

    Raises:
        UserFault: something that the run needs is missing, or cannot be used.
        RunFailedError: as :meth:`Run.wait`; or its process has died before it began.
    """
    folder = Path(job.folder)
    apart = RunApart(job)
    try:
        with Progress(RunPicture(folder, apart.newest_line), is_shown=progress) as shown:
            if _has_begun_once_checked(folder, apart, shown):
                _APART[folder] = apart
            run = Run(folder)
            if wait:
                _await_end(folder, shown)
            return run
    except KeyboardInterrupt:
        apart.signal(signal.SIGTERM)
        apart.has_ended(STOP_TIMEOUT_S)
        raise


def _has_begun_once_checked(folder: Path, apart: RunApart, shown: Progress) -> bool:
    """False where there was nothing to do."""
    while not _has_begun(folder, apart) and not apart.has_ended(LOOK_EVERY_S):
        shown.look()
    if _has_begun(folder, apart):
        return True
    end = apart.end()
    if end.exit_code == USER_HAS_TO_CHANGE:
        raise UserFault(terminal_lines(end.story))
    if end.exit_code:
        raise RunFailedError(terminal_lines(f"{folder}: {end.story}"), str(folder))
    return False


@contextmanager
def new_folder(parent: Path, name: str) -> Generator[Path]:
    """The folder of a run that is begun within the block; it is removed again where that fails before it has begun.

    Raises:
        UserFault: it cannot be made.
    """
    folder = make_run_folder(parent.expanduser().absolute(), name)
    try:
        yield folder
    except UserFault as error:
        raise UserFault(as_given(str(error), folder)) from error
    finally:
        if not (folder / RECORD_NAME).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _is_over(folder: Path, timeout_s: float = 0.0) -> bool:
    """Whether the run has ended, or its process ends within this time."""
    record = read_record(folder)
    return record.state != "running" or has_ended(folder, record, timeout_s)


def _await_end(folder: Path, shown: Progress, timeout_s: float | None = None) -> None:
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not _is_over(folder, min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))):
        shown.look()
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{folder}: goes on after {timeout_s:g} s")
    _check_end(folder)


def _check_end(folder: Path) -> None:
    apart, status = _apart_of(folder), run_status(folder)
    told = None if apart is None else apart.end()
    if status.state in ("completed", "stopped"):
        return
    # It may hold text of a model, and Python prints a message as it is.
    story = terminal_lines((told.story if told is not None else "") or status.story or f"the run has {status.state}")
    if status.exit_code == USER_HAS_TO_CHANGE:
        raise UserFault(story)
    raise RunFailedError(f"{folder}: {story}\n{what_is_left(folder)}", str(folder))


def _apart_of(folder: Path) -> RunApart | None:
    """The process that drives the run, or drove it last, if it is of this program."""
    apart = _APART.get(folder)
    return apart if apart is not None and _has_begun(folder, apart) else None


def _has_begun(folder: Path, apart: RunApart) -> bool:
    return (folder / RECORD_NAME).is_file() and read_record(folder).pid == apart.pid
