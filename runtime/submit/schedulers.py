"""What is asked of Slurm, Kubernetes and SkyPilot: submit, how does it stand, its log, stop."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import msgspec
import yaml

from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import RECORD_NAME
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.submit.options import RayJobOptions, SkyPilotOptions
from penstock.runtime.submit.scheduler_names import Scheduler
from penstock.runtime.submit.tools import CALL_TIMEOUT_S, LAUNCH_TIMEOUT_S, call, stream, try_call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.runtime.submit.job import Job
    from penstock.runtime.submit.options import SubmitOptions

STOP_TIMEOUT_S: Final = 660.0
"""For a run to write its checkpoint."""
END_TIMEOUT_S: Final = 60.0
"""From the end of a run to that of its job; then the job is cancelled."""


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
    """``sky``: a cluster of the run's own, that stays for the next attempt until it has been idle. A submission is
    called ``CLUSTER/NUMBER``, as what stops a run is another job of its cluster."""

    program = "sky"
    STATES: Final = {
        0: JobState(Stage.COMPLETED, "SUCCEEDED"),
        100: JobState(Stage.ENDED, "FAILED"),
        102: JobState(Stage.ENDED, "not found"),
        103: JobState(Stage.ENDED, "CANCELLED"),
    }
    """By the exit codes of ``sky logs --status``."""
    NO_CLUSTER: Final = ("not found", "does not exist", "is not up", "STOPPED")
    """Words of it where the cluster is stopped or gone, and every job of it with it."""

    NOT_FINISHED: Final = 101
    """Another one; what the job does is in the words."""
    RUNNING: Final = "RUNNING"
    SAID: Final = re.compile(r"^Job (\d+): (\w+)", re.MULTILINE)

    def __init__(self, options: SkyPilotOptions, secret_names: tuple[str, ...]) -> None:
        self._setup, self._secret_names = options.setup, secret_names

    def submit(self, job: Job, script: Path) -> str:
        """See :class:`SchedulerClient`, as for the other methods."""
        secrets = tuple(word for name in self._secret_names for word in ("--secret", name))
        words = ("sky", "launch", "--cluster", job.name, "--yes", "--detach-run", *secrets, str(script))
        call(words, timeout_s=LAUNCH_TIMEOUT_S)
        said = self.SAID.search(try_call(("sky", "logs", "--status", job.name)).stdout)
        return job.name if said is None else f"{job.name}/{said[1]}"

    def state(self, job: Job, job_id: str) -> JobState:
        asked = try_call(("sky", "logs", "--status", *job_id.split("/")))
        if asked.returncode == self.NOT_FINISHED:
            word = found[2] if (found := self.SAID.search(asked.stdout)) else self.RUNNING
            return JobState(Stage.RUNNING if word == self.RUNNING else Stage.WAITING, word)
        if (known := self.STATES.get(asked.returncode)) is not None:
            return known
        said = terminal_text((asked.stderr + asked.stdout).strip(), max_chars=1000)
        if any(sign in said for sign in self.NO_CLUSTER):
            return JobState(Stage.ENDED, said)
        raise UserFault(f"sky logs --status {job_id}: exit code {asked.returncode}: {said}")

    def log(self, job: Job, job_id: str, poll_s: float) -> Iterator[str]:
        yield from _lines(("sky", "logs", "--follow", *job_id.split("/")))

    def stop(self, job: Job, job_id: str) -> None:
        cluster, _, number = job_id.partition("/")
        by_hand = f"sky cancel --yes {cluster} {number or '--all'}"
        if not number:
            raise UserFault(f"which job of {cluster} the run is is not known here; to end it without saving: {by_hand}")
        if self.state(job, job_id).stage is Stage.RUNNING:
            self._have_saved(job, cluster, by_hand)
            end_s = time.monotonic() + END_TIMEOUT_S
            while not self.state(job, job_id).is_over and time.monotonic() < end_s:
                time.sleep(1.0)
        if not self.state(job, job_id).is_over:
            call(("sky", "cancel", "--yes", cluster, number))

    def _have_saved(self, job: Job, cluster: str, by_hand: str) -> None:
        """``penstock stop`` on the run's first node: a job of as many nodes has the same one first.

        Raises:
            UserFault: it failed, or took too long; the run may go on.
        """
        nodes = yaml.safe_load(job.script(Scheduler.SKYPILOT).read_bytes()).get("num_nodes", 1)
        run = shlex.quote(job.record.run_folder)
        script = (
            "set -euo pipefail",
            *self._setup,
            f'if [ "$SKYPILOT_NODE_RANK" = 0 ] && [ -e {run}/{RECORD_NAME} ]; then',
            f"    penstock stop {run} --timeout 600",
            "fi",
        )
        task = job.own_folder / "stop.yaml"
        task.touch(mode=0o600)  # lines of set-up are the user's
        task.write_text(yaml.safe_dump({"name": "stop", "num_nodes": nodes, "run": "\n".join(script)}))
        try:
            call(("sky", "exec", cluster, str(task)), timeout_s=STOP_TIMEOUT_S + CALL_TIMEOUT_S)
        except UserFault as error:
            raise UserFault(f"{error}\nto end the run without saving: {by_hand}") from None


def client(options: SubmitOptions, secret_names: tuple[str, ...] = ()) -> SchedulerClient:
    """The one that is meant."""
    if isinstance(options, RayJobOptions):
        return RayJob(options)
    return SkyPilot(options, secret_names) if isinstance(options, SkyPilotOptions) else Slurm()


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
