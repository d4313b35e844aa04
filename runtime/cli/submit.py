"""``penstock run --submit``: a run given to a scheduler, and what the same command does once it is there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import RECORD_NAME
from penstock.runtime.launch.status import run_status
from penstock.runtime.safe_text import terminal_lines, terminal_text
from penstock.runtime.submit.options import read_options
from penstock.runtime.submit.scheduler_names import JobAction
from penstock.runtime.submit.schedulers import Stage
from penstock.runtime.submit.submission import Submission, submitted, write_job
from penstock.runtime.submit.tools import require

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.scenario import Scenario
    from penstock.runtime.submit.job import Job
    from penstock.runtime.submit.scheduler_names import Scheduler


def _tell(console: Console, text: str) -> None:
    """One line on the terminal."""
    console.print(escape(terminal_text(text)), soft_wrap=True, highlight=False)


def submit_run(
    scenario: Scenario,
    scheduler: Scheduler,
    config: Path | None,
    action: JobAction | None,
    console: Console,
    *,
    dry_run: bool,
) -> int:
    """Do what is asked of the newest run of this name, or submit it and follow it; the exit code.

    Raises:
        UserFault: something has to be changed, or is missing.
    """
    from penstock.runtime.cli.program import errors

    asked = Submission(
        scenario,
        scheduler,
        read_options(scheduler, config),
        tell=partial(_tell, console),
        note=partial(_tell, errors),  # as the standard output of a dry run is the file itself
        while_checking=partial(console.status, "checking that everything is there …"),
    )
    job = None if action is JobAction.NEW else asked.newest
    is_look = action in (JobAction.STATUS, JobAction.LOG, JobAction.STOP)
    if dry_run:
        if is_look:
            raise UserFault(f"--dry-run writes a job's file; leave --job {action} away")
        console.print(write_job(asked, job).read_text(encoding="utf-8"), markup=False, soft_wrap=True, end="")
        return 0
    require(asked.client.program)
    if action is not None and is_look:
        if job is None or job.record.job_id is None:
            raise UserFault(f"{asked.parent}: no run {scenario.run.name} was given to {scheduler} from here yet")
        return _look(asked, job, job.record.job_id, action, console)
    given = submitted(asked, job)
    return 0 if given is None or action is JobAction.SUBMIT else _follow(asked, given, console)


def _look(asked: Submission, job: Job, job_id: str, action: JobAction, console: Console) -> int:
    """Status, log or end of a submission; the exit code."""
    if action is JobAction.STOP:
        state = asked.client.state(job, job_id)
        if state.is_over:
            asked.tell(f"{job.folder}: nothing to stop, {asked.scheduler} job {job_id} is over ({state.text})")
            return 0
        asked.tell(f"stopping {asked.scheduler} job {job_id} …")
        asked.client.stop(job, job_id)
        asked.tell("stopped; the same command without --job goes on with it")
        return 0
    if action is JobAction.LOG:
        return _follow(asked, job, console)
    state = asked.client.state(job, job_id)
    asked.tell(f"{job.folder}: {asked.scheduler} job {job_id}: {state.stage} ({state.text})")
    if (job.folder / RECORD_NAME).is_file():
        run = run_status(job.folder)
        reward = "" if run.reward is None else f", reward {run.reward:.3f}"
        asked.tell(f"  step {run.version}{f' of {run.num_steps}' if run.num_steps else ''}{reward}")
        if state.is_over and run.story:
            asked.tell(f"  {run.story}")
    return 1 if state.stage is Stage.ENDED else 0


def _follow(asked: Submission, job: Job, console: Console) -> int:
    """Show the log until the job is over; the exit code. Ctrl-C ends the showing, and not the job."""
    job_id = job.record.job_id
    assert job_id is not None, "it was submitted"
    try:
        for line in asked.client.log(job, job_id, asked.options.poll_s):
            console.print(terminal_lines(line), markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        asked.tell("the job goes on; the same command follows it again, and --job stop ends it")
        raise
    state = asked.client.state(job, job_id)
    goes_on = "" if state.stage is Stage.COMPLETED else "; the same command goes on with it"
    asked.tell(f"{asked.scheduler} job {job_id}: {state.text}{goes_on}")
    return 0 if state.stage is Stage.COMPLETED else 1
