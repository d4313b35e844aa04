"""One run on a cluster: what it takes there, and the record of its submissions in ``job/`` of its folder."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.runtime.launch.again import changes_since, write_asked
from penstock.runtime.launch.launch import has_entries
from penstock.runtime.launch.runs import RECORD_NAME, make_run_folder, read_record
from penstock.runtime.submit.scheduler_names import Scheduler

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.scenario import Scenario

JOB_FOLDER: Final = "job"
RECORD_FILE: Final = "job.json"
ASKED_FILE: Final = "asked.yaml"
SCRIPT_NAMES: Final = {
    Scheduler.SLURM: "job.sh",
    Scheduler.RAYJOB: "rayjob.yaml",
    Scheduler.SKYPILOT: "task.yaml",
}
MAX_NAME: Final = 46
"""Characters of a job's name; Kubernetes adds its own to it and has room for 63."""


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes of a cluster: what the templates fill in beside the submit config."""

    name: str
    """Of the job: that of the run's folder, in lower case, digits and dashes."""
    run_folder: str
    """As the cluster sees it, absolute."""
    num_nodes: int
    gpus_per_node: int
    """0: none is asked for."""
    cpus_per_node: int
    uses_sglang: bool
    """Some engine is a server in SGLang's environment, on GPUs."""
    sglang_folder: str
    """Where environments lie (``PENSTOCK_ENVS``)."""
    pass_env: tuple[str, ...]
    """Variables that the scenario hands on to functions of the user's."""
    scenario: str
    """Resolved, as YAML."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ``job/job.json`` holds."""

    scheduler: Scheduler
    run_folder: str
    """As the cluster sees it."""
    job_id: str | None = None
    """Of the newest submission, as the scheduler calls it; None: only written, never submitted."""
    submitted_at: float | None = None
    """Unix time, seconds."""
    earlier_ids: tuple[str, ...] = ()


class Job:
    """The folder of a run that is given to a scheduler, on this machine."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the run, absolute.
        """
        self.folder = folder
        self.own_folder = folder / JOB_FOLDER

    @property
    def name(self) -> str:
        """That its scheduler knows it by."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-")
        stamp = re.search(r"-\d{8}-\d{6}(-\d+)?$", slug)
        tail = stamp[0] if stamp else ""
        head = slug.removesuffix(tail)[: MAX_NAME - len(tail)].strip("-")
        return f"{head}{tail}" if head[:1].isalpha() else f"run-{head}{tail}"[:MAX_NAME]

    @property
    def record(self) -> JobRecord:
        """What was submitted last.

        Raises:
            UserFault: it cannot be read.
        """
        file = self.own_folder / RECORD_FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=JobRecord)
        except (OSError, *UNREADABLE) as error:
            raise UserFault(f"{file}: cannot be read: {error}") from None

    @property
    def is_completed(self) -> bool:
        """Whether the run says so itself, where this machine sees its folder as the cluster does."""
        return (self.folder / RECORD_NAME).is_file() and read_record(self.folder).state == "completed"

    def script(self, scheduler: Scheduler) -> Path:
        """What the scheduler is given."""
        return self.own_folder / SCRIPT_NAMES[scheduler]

    @property
    def has_begun(self) -> bool:
        """Whether something of the run is recorded, so that it goes on; on a folder that only the cluster sees,
        whether it was ever submitted.

        Raises:
            UserFault: its ledger cannot be read.
        """
        if (self.folder / LEDGER_FILE).is_file():
            return has_entries(self.folder)
        return self.record.job_id is not None and self.record.run_folder != str(self.folder)

    def changes(self, scenario: Scenario) -> list[str]:
        """What differs from the scenario that was submitted before, as overrides ``key=value``.

        Raises:
            UserFault: it differs where a run that goes on must not.
        """
        try:
            return changes_since(self.own_folder / ASKED_FILE, scenario)
        except UserFault as error:
            raise UserFault(f"{self.folder}: {error}; as a job: --job new") from None

    def write(self, scheduler: Scheduler, run_folder: str, scenario: Scenario, script: str) -> Path:
        """Write what the scheduler is given, and the record; the path of the former."""
        self.own_folder.mkdir(mode=0o700, exist_ok=True)
        file = self.script(scheduler)
        file.touch(mode=0o600)  # addresses in a scenario may hold passwords
        file.write_text(script, encoding="utf-8")
        if not (self.own_folder / RECORD_FILE).is_file():
            self._keep(JobRecord(scheduler=scheduler, run_folder=run_folder))
        if self.record.job_id is None:  # who gives it to the scheduler by hand does not come back here
            write_asked(self.own_folder / ASKED_FILE, scenario)
        return file

    def note_submitted(self, job_id: str, scenario: Scenario) -> JobRecord:
        """Keep the scheduler's name for the submission that was just made, and what was asked for with it."""
        write_asked(self.own_folder / ASKED_FILE, scenario)
        before = self.record
        earlier = before.earlier_ids if before.job_id is None else (*before.earlier_ids, before.job_id)
        record = msgspec.structs.replace(before, job_id=job_id, submitted_at=time.time(), earlier_ids=earlier)
        self._keep(record)
        return record

    def _keep(self, record: JobRecord) -> None:
        scratch = self.own_folder / f".{RECORD_FILE}.{os.getpid()}"
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        scratch.replace(self.own_folder / RECORD_FILE)


def find_job(parent: Path, name: str, scheduler: Scheduler) -> Job | None:
    """The newest run of this name that was written for this scheduler.

    Args:
        parent: folder of the runs' folders.
        name: ``run.name`` of the scenario.
        scheduler: whose.
    """
    pattern = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?")
    found = [
        job
        for file in parent.glob(f"*/{JOB_FOLDER}/{RECORD_FILE}")
        if pattern.fullmatch(file.parents[1].name) and (job := Job(file.parents[1])).record.scheduler is scheduler
    ]
    return max(found, key=lambda job: job.folder.name, default=None)


def make_job(parent: Path, name: str) -> Job:
    """A new folder for a run that is to be submitted.

    Raises:
        UserFault: it cannot be made.
    """
    return Job(make_run_folder(parent, name))
