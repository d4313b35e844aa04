"""``penstock run --submit``: a run given to a scheduler, and what the same command does once it is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.cli.node_plan import plan_nodes
from penstock.runtime.cli.placement import placement
from penstock.runtime.launch.machine import FAILED, LEFT_OUT, OK, ask_machine
from penstock.runtime.launch.runs import RECORD_NAME
from penstock.runtime.launch.status import run_status
from penstock.runtime.preflight.gpu_memory import memory_outcome
from penstock.runtime.run.placement import num_gpus_asked
from penstock.runtime.safe_text import terminal_lines, terminal_text
from penstock.runtime.submit.job import Job, find_job, make_job
from penstock.runtime.submit.options import RayJobOptions, SkyPilotOptions, SlurmOptions, read_options
from penstock.runtime.submit.plan import Size, for_cluster, num_nodes_of, paths_of, plan_job
from penstock.runtime.submit.render import render_job
from penstock.runtime.submit.scheduler_names import JobAction, Scheduler
from penstock.runtime.submit.schedulers import Stage, client
from penstock.runtime.submit.tools import require

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.runtime.scenario import Scenario
    from penstock.runtime.submit.options import SubmitOptions
    from penstock.runtime.submit.schedulers import SchedulerClient


@dataclass(frozen=True)
class Submission:
    """One run of one scheduler, as the command names it."""

    scenario: Scenario
    scheduler: Scheduler
    options: SubmitOptions
    console: Console

    @property
    def parent(self) -> Path:
        """Of the runs' folders here."""
        return Path(self.scenario.run.folder).expanduser().absolute()

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Variables whose values SkyPilot takes from here."""
        options = self.options
        if not isinstance(options, SkyPilotOptions):
            return ()
        needed = (*options.secrets, *self.scenario.runtime.pass_env)
        return tuple(name for name in dict.fromkeys(needed) if name not in options.environment)

    @property
    def client(self) -> SchedulerClient:
        """Who is asked."""
        return client(self.options, self.secret_names)

    def tell(self, text: str) -> None:
        """One line on the terminal."""
        self.console.print(escape(terminal_text(text)), soft_wrap=True, highlight=False)


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
    asked = Submission(scenario, scheduler, read_options(scheduler, config), console)
    job = None if action is JobAction.NEW else find_job(asked.parent, scenario.run.name, scheduler)
    is_look = action in (JobAction.STATUS, JobAction.LOG, JobAction.STOP)
    if dry_run:
        if is_look:
            raise UserFault(f"--dry-run writes a job's file; leave --job {action} away")
        console.print(_write(asked, job).read_text(encoding="utf-8"), markup=False, soft_wrap=True, end="")
        return 0
    require(asked.client.program)
    if action is not None and is_look:
        if job is None or job.record.job_id is None:
            raise UserFault(f"{asked.parent}: no run {scenario.run.name} was given to {scheduler} from here yet")
        return _look(asked, job, job.record.job_id, action)
    submitted = _submitted(asked, job)
    return 0 if submitted is None or action is JobAction.SUBMIT else _follow(asked, submitted)


def _submitted(asked: Submission, job: Job | None) -> Job | None:
    """The run's job, which waits or runs by now; None where the run is completed and nothing more is asked of it."""
    if job is not None and (before := job.record.job_id) is not None:
        state = asked.client.state(job, before)
        if not state.is_over:
            if changes := job.changes(asked.scenario):
                raise UserFault(
                    f"{job.folder}: {asked.scheduler} job {before} is there already ({state.text}), without "
                    f"{', '.join(changes)}: to go on with that, end it first with --job stop"
                )
            asked.tell(f"{job.folder}: {asked.scheduler} job {before} is there already ({state.text})")
            return job
        is_completed = job.is_completed or (state.stage is Stage.COMPLETED and not (job.folder / RECORD_NAME).is_file())
        if is_completed and not job.changes(asked.scenario):
            asked.tell(f"{job.folder}: completed; to train more, raise run.num_steps; for another run: --job new")
            return None
    if isinstance(asked.options, SlurmOptions) and asked.options.image is None and asked.options.check_here:
        _check_here(asked)
    script = _write(asked, job)
    job = Job(script.parents[1])
    goes_on = "goes on" if job.has_begun else "begins"
    record = job.note_submitted(asked.client.submit(job, script), asked.scenario)
    asked.tell(f"submitted {asked.scheduler} job {record.job_id}, in which the run {goes_on}: {job.folder}")
    return job


def _check_here(asked: Submission) -> None:
    """What the nodes would lack and this machine lacks as well need not wait in the queue to be told.

    Raises:
        UserFault: something is missing.
    """
    with asked.console.status("checking that everything is there …"):
        outcomes = ask_machine(for_cluster(asked.scenario), asked.parent)
    if missing := [
        f"{name}: {text.removeprefix(f'{FAILED}: ')}" for name, text in outcomes.items() if text.startswith(FAILED)
    ]:
        hint = "(check_here: false in the submit config, where only the nodes have it)"
        raise UserFault("\n".join((*missing, hint)))


def _write(asked: Submission, job: Job | None) -> Path:
    """Write the job's file; its path."""
    options, is_rayjob = asked.options, asked.scheduler is Scheduler.RAYJOB
    on_cluster, size = for_cluster(asked.scenario), _size(asked.scenario, options)
    if job is not None and job.has_begun:
        job.changes(asked.scenario)
    if isinstance(options, SkyPilotOptions) and size.gpus_per_node and options.accelerators is None:
        raise UserFault("accelerators: missing in the submit config; the scenario takes GPUs: name them, such as H100")
    num_nodes = num_nodes_of(asked.scenario, size, options, has_own_cluster=is_rayjob)
    is_new = job is None
    job = job or make_job(asked.parent, asked.scenario.run.name)
    remote = options if isinstance(options, RayJobOptions | SkyPilotOptions) else None
    run_folder = str(job.folder if remote is None else Path(remote.shared_folder) / job.folder.name)
    plan = plan_job(on_cluster if is_rayjob else asked.scenario, job, run_folder, size, options, num_nodes)
    try:
        text = render_job(asked.scheduler, plan, options, asked.secret_names)
    except UserFault:
        if is_new:
            job.folder.rmdir()
        raise
    script = job.write(asked.scheduler, run_folder, asked.scenario, text)
    nodes = counted(num_nodes, "node")
    _note(f"{script}: {nodes}, {counted(plan.gpus_per_node, 'GPU')} and {counted(plan.cpus_per_node, 'CPU')} each")
    has_image = isinstance(options, SlurmOptions) and options.image is not None
    for path in paths_of(asked.scenario) if remote or has_image else ():
        _note(f"has to be there on the nodes as well: {path}")
    return script


def _note(text: str) -> None:
    """On the standard error, as the standard output of a dry run is the file itself."""
    from penstock.runtime.cli.program import errors

    errors.print(escape(terminal_text(text)), soft_wrap=True, highlight=False)


def _size(scenario: Scenario, options: SubmitOptions) -> Size:
    """The fewest nodes that are enough.

    Raises:
        UserFault: no number is, or the GPUs' memory is too small.
    """
    on_cluster = for_cluster(scenario)
    rows = placement(scenario)
    num_threads = sum(row.num_processes * row.num_threads for row in rows)
    num_cpu_threads = sum(row.num_processes * row.num_threads for row in rows if row.device == "cpu")
    plan = plan_nodes(on_cluster, options.gpus_per_node)
    if plan is None:
        return Size(1, 0, num_threads)
    if plan.num_nodes == 1 and options.gpus_per_node is None:  # not a whole node for the sake of a part of it
        few = plan_nodes(on_cluster, num_gpus_asked(scenario))
        plan = few if few is not None and few.num_nodes == 1 and not few.refusal else plan
    if plan.refusal:
        raise UserFault(plan.refusal)
    memory = memory_outcome(scenario, None, ok=OK, failed=FAILED, left_out=LEFT_OUT)
    if memory.startswith(FAILED):
        raise UserFault(memory.removeprefix(f"{FAILED}: "))
    return Size(plan.num_nodes, plan.gpus_per_node, num_cpu_threads, num_threads - num_cpu_threads)


def _look(asked: Submission, job: Job, job_id: str, action: JobAction) -> int:
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
        return _follow(asked, job)
    state = asked.client.state(job, job_id)
    asked.tell(f"{job.folder}: {asked.scheduler} job {job_id}: {state.stage} ({state.text})")
    if (job.folder / RECORD_NAME).is_file():
        run = run_status(job.folder)
        reward = "" if run.reward is None else f", reward {run.reward:.3f}"
        asked.tell(f"  step {run.version}{f' of {run.num_steps}' if run.num_steps else ''}{reward}")
        if state.is_over and run.story:
            asked.tell(f"  {run.story}")
    return 1 if state.stage is Stage.ENDED else 0


def _follow(asked: Submission, job: Job) -> int:
    """Show the log until the job is over; the exit code. Ctrl-C ends the showing, and not the job."""
    job_id = job.record.job_id
    assert job_id is not None, "it was submitted"
    try:
        for line in asked.client.log(job, job_id, asked.options.poll_s):
            asked.console.print(terminal_lines(line), markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        asked.tell("the job goes on; the same command follows it again, and --job stop ends it")
        raise
    state = asked.client.state(job, job_id)
    goes_on = "" if state.stage is Stage.COMPLETED else "; the same command goes on with it"
    asked.tell(f"{asked.scheduler} job {job_id}: {state.text}{goes_on}")
    return 0 if state.stage is Stage.COMPLETED else 1
