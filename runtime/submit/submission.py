"""A run that is given to a scheduler: what is written for it, and whether it is given again. For the command line, and
for programs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.launch.machine import FAILED, LEFT_OUT, OK, ask_machine
from penstock.runtime.launch.runs import RECORD_NAME
from penstock.runtime.preflight.gpu_memory import memory_outcome
from penstock.runtime.run.node_plan import plan_nodes
from penstock.runtime.run.placement import num_gpus_asked
from penstock.runtime.run.process_table import placement
from penstock.runtime.submit.job import Job, find_job, make_job
from penstock.runtime.submit.options import RayJobOptions, SkyPilotOptions, SlurmOptions, read_options
from penstock.runtime.submit.plan import Size, for_cluster, num_nodes_of, paths_of, plan_job
from penstock.runtime.submit.render import render_job
from penstock.runtime.submit.scheduler_names import Scheduler
from penstock.runtime.submit.schedulers import Stage, client
from penstock.runtime.submit.tools import require

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.runtime.scenario import Scenario
    from penstock.runtime.submit.options import SubmitOptions
    from penstock.runtime.submit.schedulers import SchedulerClient


def _nobody(text: str) -> None:
    """Hears of it."""


@dataclass(frozen=True)
class Submission:
    """One run of one scheduler."""

    scenario: Scenario
    scheduler: Scheduler
    options: SubmitOptions
    tell: Callable[[str], None] = _nobody
    """Hears what was done."""
    note: Callable[[str], None] = _nobody
    """Hears what was written, and what it takes."""
    while_checking: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around the checks of this machine, which take seconds."""

    @property
    def parent(self) -> Path:
        """Of the runs' folders here."""
        return Path(self.scenario.run.folder).expanduser().absolute()

    @property
    def newest(self) -> Job | None:
        """The newest run of this name that was written for this scheduler."""
        return find_job(self.parent, self.scenario.run.name, self.scheduler)

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


def give_to_scheduler(scenario: Scenario, scheduler: str, config: Path | None, *, is_new: bool) -> Job | None:
    """As :func:`submitted`, of a scenario, the name of a scheduler, and its config.

    Args:
        scenario: resolved.
        scheduler: one of :class:`Scheduler`.
        config: the submit config; None: its defaults.
        is_new: another run, whatever was submitted before.

    Raises:
        UserFault: something has to be changed, or is missing.
    """
    if scheduler not in set(Scheduler):
        raise UserFault(f"scheduler: there is no '{scheduler}'; there are {', '.join(Scheduler)}")
    asked = Submission(scenario, Scheduler(scheduler), read_options(Scheduler(scheduler), config))
    require(asked.client.program)
    return submitted(asked, None if is_new else asked.newest)


def submitted(asked: Submission, job: Job | None) -> Job | None:
    """Give the run to the scheduler, unless it has it already.

    Returns:
        The run's job, which waits or runs by now; None where the run is completed and nothing more is asked of it.

    Raises:
        UserFault: something has to be changed, or is missing.
    """
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
    script = write_job(asked, job)
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
    with asked.while_checking():
        outcomes = ask_machine(for_cluster(asked.scenario), asked.parent)
    if missing := [
        f"{name}: {text.removeprefix(f'{FAILED}: ')}" for name, text in outcomes.items() if text.startswith(FAILED)
    ]:
        hint = "(check_here: false in the submit config, where only the nodes have it)"
        raise UserFault("\n".join((*missing, hint)))


def write_job(asked: Submission, job: Job | None) -> Path:
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
    asked.note(f"{script}: {nodes}, {counted(plan.gpus_per_node, 'GPU')} and {counted(plan.cpus_per_node, 'CPU')} each")
    has_image = isinstance(options, SlurmOptions) and options.image is not None
    for path in paths_of(asked.scenario) if remote or has_image else ():
        asked.note(f"has to be there on the nodes as well: {path}")
    return script


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
