"""What is asked of Slurm, Kubernetes and SkyPilot: submit, how does it stand, its log, stop."""

from __future__ import annotations

import json
import subprocess
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.submit.options import RayJobOptions
from penstock.runtime.submit.scheduler_names import Scheduler
from penstock.runtime.submit.tools import LAUNCH_TIMEOUT_S, call, stream, try_call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.runtime.submit.job import Job
    from penstock.runtime.submit.options import SubmitOptions

STOP_TIMEOUT_S: Final = 660.0
"""For a run to write its checkpoint."""


class Stage(StrEnum):
    """Of a submission."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    ENDED = "ended"
    """Without having completed the run: it failed, was stopped, or the scheduler took the nodes away."""


class JobState(NamedTuple):
    """How a submission stands."""

    stage: Stage
    text: str
    """The scheduler's own word for it."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.stage in (Stage.COMPLETED, Stage.ENDED)


class SchedulerClient(Protocol):
    """One scheduler. Whatever fails is a ``UserFault`` with the scheduler's words."""

    program: str
    """Without which nothing can be submitted."""

    def submit(self, job: Job, script: Path) -> str:
        """Give it the script; what it calls the submission."""
        ...

    def state(self, job: Job, job_id: str) -> JobState:
        """How the submission stands."""
        ...

    def log(self, job: Job, job_id: str, poll_s: float) -> Iterator[str]:
        """Lines of its log as they come, until it is over; none while it waits."""
        ...

    def stop(self, job: Job, job_id: str) -> None:
        """End it, with a checkpoint where the scheduler can be asked for that."""
        ...


class Slurm:
    """``sbatch``, ``squeue``, ``scancel``. The log, and how the script has ended, are files in the run's folder: what
    has ended, Slurm itself forgets after some minutes where it has no accounts."""

    program = "sbatch"
    WAITING: Final = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")

    def submit(self, job: Job, script: Path) -> str:
        """See :class:`SchedulerClient`, as for the other methods."""
        return call(("sbatch", "--parsable", str(script))).strip().partition(";")[0]

    def state(self, job: Job, job_id: str) -> JobState:
        asked = try_call(("squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%T"))
        word = asked.stdout.strip().partition("\n")[0]
        if asked.returncode and "Invalid job id" not in asked.stderr:
            raise UserFault(f"squeue: {asked.stderr.strip()}")
        if word in self.WAITING:
            return JobState(Stage.WAITING, word)
        if word in ("RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"):
            return JobState(Stage.RUNNING, word)
        code = job.own_folder / f"{job_id}.exit"
        if code.is_file() and (found := code.read_text(encoding="utf-8").strip()):
            return JobState(Stage.ENDED if int(found) else Stage.COMPLETED, f"{word or 'ENDED'}, exit code {found}")
        return JobState(Stage.ENDED, word or "gone: it ended without a word")

    def log(self, job: Job, job_id: str, poll_s: float) -> Iterator[str]:
        file, position, rest = job.own_folder / f"{job_id}.log", 0, b""
        is_over = False
        while True:
            if file.is_file():
                with file.open("rb") as opened:
                    opened.seek(position)
                    new = opened.read()
                position += len(new)
                *lines, rest = (rest + new).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            if is_over:
                break
            is_over = self.state(job, job_id).is_over
            if not is_over:
                time.sleep(poll_s)
        if rest:
            yield rest.decode("utf-8", "replace")

    def stop(self, job: Job, job_id: str) -> None:
        if self.state(job, job_id).stage is Stage.WAITING:
            call(("scancel", job_id))
            return
        call(("scancel", "--batch", "--signal=TERM", job_id))
        end_s = time.monotonic() + STOP_TIMEOUT_S
        while not self.state(job, job_id).is_over:
            if time.monotonic() > end_s:
                raise UserFault(
                    f"job {job_id} goes on {STOP_TIMEOUT_S:g} s after its stop; to end it: scancel {job_id}"
                )
            time.sleep(1.0)


class RayJobStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of a RayJob's ``status``."""

    job_status: str = ""
    job_deployment_status: str = ""
    message: str = ""
    ray_cluster_name: str = ""


class RayJob:
    """``kubectl``, with the KubeRay operator in the cluster."""

    program = "kubectl"

    def __init__(self, options: RayJobOptions) -> None:
        self._words = ("kubectl", *(("--namespace", options.namespace) if options.namespace else ()))

    def submit(self, job: Job, script: Path) -> str:
        """See :class:`SchedulerClient`, as for the other methods."""
        call((*self._words, "delete", "rayjob", job.name, "--ignore-not-found", "--wait", "--timeout=110s"))
        call((*self._words, "apply", "--filename", str(script)))
        return job.name

    def state(self, job: Job, job_id: str) -> JobState:
        asked = self._status(job_id)
        if asked is None:
            return JobState(Stage.ENDED, "deleted")
        word = " ".join(filter(None, (asked.job_status or asked.job_deployment_status or "new", asked.message)))
        if asked.job_status == "SUCCEEDED":
            return JobState(Stage.COMPLETED, word)
        if asked.job_status in ("FAILED", "STOPPED") and asked.job_deployment_status != "Retrying":
            return JobState(Stage.ENDED, word)
        if asked.job_deployment_status in ("Failed", "ValidationFailed", "Suspended", "Complete"):
            return JobState(Stage.ENDED, f"{asked.job_deployment_status} {asked.message}".strip())
        return JobState(Stage.RUNNING if asked.job_status == "RUNNING" else Stage.WAITING, word)

    def log(self, job: Job, job_id: str, poll_s: float) -> Iterator[str]:
        while (state := self.state(job, job_id)).stage is Stage.WAITING:
            time.sleep(poll_s)
        if state.text != "deleted":
            yield from _lines((*self._words, "logs", "--follow", f"job/{job_id}"))
        while not self.state(job, job_id).is_over:
            time.sleep(poll_s)

    def stop(self, job: Job, job_id: str) -> None:
        asked = self._status(job_id)
        if asked is not None and asked.job_status == "RUNNING":
            labels = f"ray.io/cluster={asked.ray_cluster_name},ray.io/node-type=head"
            pod = call((*self._words, "get", "pods", "--selector", labels, "--output", "name")).strip()
            inside = ("--", "penstock", "stop", job.record.run_folder, "--timeout", "600")
            call((*self._words, "exec", pod, "--container", "ray-head", *inside), timeout_s=STOP_TIMEOUT_S)
        call((*self._words, "delete", "rayjob", job_id, "--ignore-not-found"))
        call((*self._words, "delete", "secret", job_id, "--ignore-not-found"))

    def _status(self, job_id: str) -> RayJobStatus | None:
        text = call((*self._words, "get", "rayjob", job_id, "--ignore-not-found", "--output", "json"))
        if not text.strip():
            return None
        found = cast("dict[str, Any]", json.loads(text)).get("status", {})
        return msgspec.convert(found, RayJobStatus)


class SkyPilot:
    """``sky``: a cluster of the run's own, that stays for the next attempt until it has been idle."""

    program = "sky"
    STATES: Final = {
        0: JobState(Stage.COMPLETED, "SUCCEEDED"),
        100: JobState(Stage.ENDED, "FAILED"),
        101: JobState(Stage.RUNNING, "not finished"),
        102: JobState(Stage.ENDED, "not found"),
        103: JobState(Stage.ENDED, "CANCELLED"),
    }
    """By the exit codes of ``sky logs --status``."""
    NO_CLUSTER: Final = ("not found", "does not exist", "is not up", "STOPPED")
    """Words of it where the cluster is stopped or gone, and every job of it with it."""

    def __init__(self, secret_names: tuple[str, ...]) -> None:
        self._secret_names = secret_names

    def submit(self, job: Job, script: Path) -> str:
        """See :class:`SchedulerClient`, as for the other methods."""
        secrets = tuple(word for name in self._secret_names for word in ("--secret", name))
        words = ("sky", "launch", "--cluster", job.name, "--yes", "--detach-run", *secrets, str(script))
        call(words, timeout_s=LAUNCH_TIMEOUT_S)
        return job.name

    def state(self, job: Job, job_id: str) -> JobState:
        asked = try_call(("sky", "logs", "--status", job_id))
        if (known := self.STATES.get(asked.returncode)) is not None:
            return known
        said = terminal_text((asked.stderr + asked.stdout).strip(), max_chars=1000)
        if any(sign in said for sign in self.NO_CLUSTER):
            return JobState(Stage.ENDED, said)
        raise UserFault(f"sky logs --status {job_id}: exit code {asked.returncode}: {said}")

    def log(self, job: Job, job_id: str, poll_s: float) -> Iterator[str]:
        yield from _lines(("sky", "logs", "--follow", job_id))

    def stop(self, job: Job, job_id: str) -> None:
        call(("sky", "cancel", "--yes", "--all", job_id))


def client(scheduler: Scheduler, options: SubmitOptions, secret_names: tuple[str, ...] = ()) -> SchedulerClient:
    """The one that is meant."""
    if isinstance(options, RayJobOptions):
        return RayJob(options)
    return Slurm() if scheduler is Scheduler.SLURM else SkyPilot(secret_names)


def _lines(words: tuple[str, ...]) -> Iterator[str]:
    """Lines of a program that ends by itself; it is ended with who reads them."""
    with stream(words) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10.0)
                except subprocess.TimeoutExpired:
                    process.kill()
