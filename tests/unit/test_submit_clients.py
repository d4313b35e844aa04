"""What the same command does before, while and after a job is there. The schedulers' programs are stand-ins that keep
what they were asked; ``tests/integration/test_slurm.py`` asks a real Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner, Result

from penstock import api
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.ledger import BatchLeased
from penstock.messages.training import UpdateMode
from penstock.runtime.cli.app import app
from penstock.runtime.launch.launch import claim_drive
from penstock.runtime.launch.runs import close_record, open_record, read_record
from penstock.runtime.submit.job import Job, find_job
from penstock.runtime.submit.scheduler_names import Scheduler

RAYJOB = "image: penstock\nvolume_claim: runs\nshared_folder: /shared/runs\nnamespace: lab\npoll_s: 0.2\n"
SKYPILOT = "shared_folder: /shared/runs\naccelerators: H100\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with nothing of a scheduler on the PATH but what a test puts there."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "touch", "sleep"):
        found = shutil.which(name)
        assert found
        (tmp_path / "bin" / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(name: str, script: str) -> None:
    """A stand-in that notes what it was asked, and then does this."""
    file = Path("bin", name)
    file.write_text(f'#!{os.path.realpath("bin/bash")}\necho "{name} $*" >> {Path.cwd()}/asked\n{script}\n')
    file.chmod(0o755)


def asked() -> list[str]:
    """What the stand-ins were asked since the last look."""
    file = Path("asked")
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def command(scheduler: str, *more: str, config: str = "") -> Result:
    words = ["run", "quickstart", "--submit", scheduler, *more]
    if config:
        Path("submit.yaml").write_text(config)
        words += ["--submit-config", "submit.yaml"]
    return CliRunner().invoke(app, words, catch_exceptions=False)


def job_of(scheduler: Scheduler) -> Job:
    job = find_job(Path("runs").absolute(), "quickstart", scheduler)
    assert job is not None
    return job


def record_steps(job: Job, state: str) -> None:
    """The run in this folder has leased a batch, and its drive has ended."""
    (job.folder / "scenario.yaml").write_bytes((job.own_folder / "asked.yaml").read_bytes())
    record = open_record(job.folder, "quickstart")
    store = SqliteStore(job.folder / LEDGER_FILE)
    store.claim(claim_drive(job.folder) + 1)
    lease = BatchLeased(version=1, group_ids=(1,), max_staleness=0, mask_stale=False, update_mode=UpdateMode.DRAIN)
    store.commit([lease])
    store.close()
    close_record(job.folder, record, {"completed": 0, "stopped": 143}[state])


@pytest.mark.parametrize(
    ("scheduler", "config", "missing"),
    [("slurm", "", "sbatch"), ("rayjob", RAYJOB, "kubectl"), ("skypilot", SKYPILOT, "sky")],
)
def test_a_missing_program_is_named_with_what_to_do(scheduler: str, config: str, missing: str) -> None:
    with pytest.raises(UserFault) as error:
        command(scheduler, config=config)
    assert str(error.value).startswith(f"{missing}: not on the PATH; ")
    assert "--dry-run writes the job's file" in str(error.value)
    assert not Path("runs").exists()


def test_slurm_is_given_the_script_once_and_then_followed() -> None:
    program("sbatch", "echo '12;cluster'")
    program("squeue", "echo RUNNING")
    first = command("slurm", "--job", "submit")
    job = job_of(Scheduler.SLURM)
    assert (first.exit_code, job.record.job_id) == (0, "12")
    assert asked() == [f"sbatch --parsable {job.own_folder / 'job.sh'}"]
    again = command("slurm", "--job", "submit")
    assert "slurm job 12 is there already (RUNNING)" in again.output
    command("slurm", "--dry-run", "engines.count=3")  # which changes nothing of the job that is there
    with pytest.raises(UserFault, match=r"without engines\.count=3: to go on .* --job stop"):
        command("slurm", "--job", "submit", "engines.count=3")
    assert not [line for line in asked() if line.startswith("sbatch")]


def test_the_log_is_shown_to_its_end_and_the_exit_code_says_what_came_of_it() -> None:
    program("sbatch", "echo 12")
    program("squeue", f"touch {Path.cwd()}/looked; [ -e {Path.cwd()}/over ] && exit 0; echo RUNNING; touch over")
    command("slurm", "--job", "new")  # followed: running at the first look, over at the second
    job = job_of(Scheduler.SLURM)
    (job.own_folder / "12.log").write_text("step 1\n\x1b[31mstep 2\nlast")
    (job.own_folder / "12.exit").write_text("143\n")
    shown = command("slurm", "--job", "log", config="poll_s: 0.2")
    assert shown.output.splitlines()[:3] == ["step 1", "\\x1b[31mstep 2", "last"]
    assert "exit code 143; the same command goes on with it" in shown.output
    assert shown.exit_code == 1
    (job.own_folder / "12.exit").write_text("0\n")
    assert command("slurm", "--job", "log").exit_code == 0
    assert command("slurm", "--job", "status").exit_code == 0


def test_what_has_ended_is_submitted_again_in_its_folder_and_what_is_completed_is_not() -> None:
    program("sbatch", 'n=$(cat n 2> /dev/null || echo 1); echo "$n"; echo $((n + 1)) > n')
    program("squeue", "exit 0")
    command("slurm", "--job", "submit")
    job = job_of(Scheduler.SLURM)
    record_steps(job, "stopped")
    resumed = command("slurm", "--job", "submit", "engines.count=3")
    assert "submitted slurm job 2, in which the run goes on" in resumed.output
    assert (job_of(Scheduler.SLURM).folder, job.record.earlier_ids) == (job.folder, ("1",))
    with pytest.raises(UserFault, match=r"data\.path.*cannot change in a run that goes on.*--job new"):
        command("slurm", "data.path=lines:5")
    record_steps(job, "completed")
    assert read_record(job.folder).state == "completed"
    asked()
    done = command("slurm", "engines.count=3")
    assert (done.exit_code, asked()) == (0, ["squeue --noheader --jobs=2 --states=all --format=%T"])
    assert "completed; to train more, raise run.num_steps; for another run: --job new" in done.output
    more = command("slurm", "--job", "submit", "engines.count=3", "run.num_steps=500")
    assert "submitted slurm job 3" in more.output
    command("slurm", "--job", "new")
    assert job_of(Scheduler.SLURM).folder != job.folder


def test_a_scenario_that_has_never_begun_may_change_altogether() -> None:
    program("sbatch", "echo 7")
    program("squeue", "exit 0")
    command("slurm", "--job", "submit")
    assert "in which the run begins" in command("slurm", "--job", "submit", "data.path=lines:5").output


def test_slurm_stops_what_runs_through_its_script_and_cancels_what_waits() -> None:
    program("sbatch", "echo 12")
    program("squeue", f"if [ -e {Path.cwd()}/stopped ]; then exit 0; fi; cat {Path.cwd()}/word")
    program("scancel", f"touch {Path.cwd()}/stopped")
    Path("word").write_text("RUNNING\n")
    command("slurm", "--job", "submit")
    assert command("slurm", "--job", "stop").exit_code == 0
    assert "scancel --batch --signal=TERM 12" in asked()
    assert "nothing to stop" in command("slurm", "--job", "stop").output
    Path("stopped").unlink()
    Path("word").write_text("PENDING\n")
    command("slurm", "--job", "stop")
    assert "scancel 12" in asked()


def test_a_refusal_of_a_scheduler_is_told_in_its_words_without_controls() -> None:
    program("sbatch", "echo 'sbatch: error: invalid \x1b[31mpartition' >&2; exit 1")
    with pytest.raises(UserFault) as error:
        command("slurm")
    assert str(error.value) == "sbatch --parsable: exit code 1: sbatch: error: invalid \\x1b[31mpartition"
    assert job_of(Scheduler.SLURM).record.job_id is None


def test_what_was_never_submitted_cannot_be_looked_at() -> None:
    program("sbatch", "echo 1")
    command("slurm", "--dry-run")
    with pytest.raises(UserFault, match="no run quickstart was given to slurm from here yet"):
        command("slurm", "--job", "status")
    with pytest.raises(UserFault, match="leave --job stop away"):
        command("slurm", "--job", "stop", "--dry-run")


def kubernetes(job_status: str, deployment_status: str = "Running") -> None:
    """What the cluster says from now on."""
    status = (
        f'{{"status": {{"jobStatus": "{job_status}", "jobDeploymentStatus": "{deployment_status}", "message": "",'
        ' "rayClusterName": "mine-abc", "jobId": "x"}}'
    )
    program(
        "kubectl",
        f"case \"$*\" in *'get rayjob'*) echo '{status}';; *'get pods'*) echo pod/head;; *logs*) echo 'step 1';; esac",
    )


def test_kubernetes_is_asked_through_kubectl() -> None:
    kubernetes("SUCCEEDED", "Complete")
    done = command("rayjob", config=RAYJOB)
    job = job_of(Scheduler.RAYJOB)
    name = job.record.job_id
    assert name == job.name
    assert (done.exit_code, job.record.run_folder) == (0, f"/shared/runs/{job.folder.name}")
    assert "step 1" in done.output
    lines = asked()
    assert lines[0].startswith(f"kubectl --namespace lab delete rayjob {name} --ignore-not-found")
    assert lines[1] == f"kubectl --namespace lab apply --filename {job.own_folder / 'rayjob.yaml'}"
    assert f"kubectl --namespace lab logs --follow job/{name}" in lines
    assert "completed" in command("rayjob", config=RAYJOB).output
    kubernetes("RUNNING")
    assert "running (RUNNING)" in command("rayjob", "--job", "status", config=RAYJOB).output
    asked()
    command("rayjob", "--job", "stop", config=RAYJOB)
    stop = f"exec pod/head --container ray-head -- penstock stop /shared/runs/{job.folder.name} --timeout 600"
    lines = asked()
    assert f"kubectl --namespace lab {stop}" in lines
    assert any("get pods --selector ray.io/cluster=mine-abc,ray.io/node-type=head" in line for line in lines)
    kubernetes("FAILED", "Failed")
    assert command("rayjob", "--job", "status", config=RAYJOB).exit_code == 1
    again = command("rayjob", "--job", "submit", config=RAYJOB)
    assert "in which the run goes on" in again.output


def test_skypilot_is_asked_through_sky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    config = f"{SKYPILOT}secrets: [TOKEN_OF_MINE]\n"
    program("sky", 'case "$*" in *--status*) exit 100;; logs*) echo "step 1";; esac')
    done = command("skypilot", config=config)
    job = job_of(Scheduler.SKYPILOT)
    assert (done.exit_code, job.record.job_id) == (1, job.name)
    assert "step 1" in done.output
    task = job.own_folder / "task.yaml"
    assert asked()[0] == f"sky launch --cluster {job.name} --yes --detach-run --secret TOKEN_OF_MINE {task}"
    assert "secret" not in (job.own_folder / "task.yaml").read_text().replace("secrets:", "")
    program("sky", 'case "$*" in *--status*) exit 101;; esac')
    assert "running" in command("skypilot", "--job", "status", config=config).output
    with pytest.raises(UserFault, match=f"to end it without saving: sky cancel --yes {job.name} --all"):
        command("skypilot", "--job", "stop", config=config)
    program("sky", "echo 'no connection to the API server' >&2; exit 1")
    with pytest.raises(UserFault, match="exit code 1: no connection to the API server"):
        command("skypilot", config=config)  # not known to be over, so not launched once more
    program("sky", 'case "$*" in *--status*) echo "Cluster x does not exist" >&2; exit 1;; esac')
    assert command("skypilot", "--job", "submit", config=config).exit_code == 0
    assert any(line.startswith("sky launch") for line in asked())


def skypilot(word: str, code: int = 101, exec_code: int = 0) -> None:
    """What the cluster's seventh job does from now on, until the run was stopped or the job was cancelled."""
    program(
        "sky",
        f"""cd {Path.cwd()}; case "$*" in
        exec*) touch over; exit {exec_code};;
        cancel*) touch over;;
        *--status*) [ -e over ] && {{ echo "Job 7: FAILED"; exit 100; }}; echo "Job 7: {word}"; exit {code};;
        esac""",
    )


def test_skypilot_has_a_run_saved_before_its_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    config = f"shared_folder: {Path.cwd()}/shared\naccelerators: H100\nnodes: 2\nsetup: [module load cuda]\n"
    skypilot("RUNNING")
    command("skypilot", "--job", "submit", config=config)
    job = job_of(Scheduler.SKYPILOT)
    assert job.record.job_id == f"{job.name}/7"
    asked()
    assert command("skypilot", "--job", "stop", config=config).exit_code == 0
    task = job.own_folder / "stop.yaml"
    lines = asked()
    assert f"sky exec {job.name} {task}" in lines
    assert not [line for line in lines if line.startswith("sky cancel")], "it has ended by itself"
    assert "is over (FAILED)" in command("skypilot", "--job", "stop", config=config).output

    # What the nodes are told: the first alone has the run stop, and only once it has begun.
    written = yaml.safe_load(task.read_text())
    run = Path("shared", job.folder.name).absolute()
    run.mkdir(parents=True)
    assert written["num_nodes"] == 2
    program("module", "")
    program("penstock", "")
    asked()
    for begun, rank, expected in ((False, 0, []), (True, 1, []), (True, 0, [f"penstock stop {run} --timeout 600"])):
        if begun:
            (run / "run.json").touch()
        monkeypatch.setenv("SKYPILOT_NODE_RANK", str(rank))
        subprocess.run(["bash", "-c", written["run"]], check=True, timeout=30)
        assert asked() == ["module load cuda", *expected]


def test_skypilot_cancels_what_has_not_begun_and_leaves_what_cannot_be_saved() -> None:
    skypilot("SETTING_UP")
    command("skypilot", "--job", "submit", config=SKYPILOT)
    job = job_of(Scheduler.SKYPILOT)
    assert "waiting (SETTING_UP)" in command("skypilot", "--job", "status", config=SKYPILOT).output
    command("skypilot", "--job", "stop", config=SKYPILOT)
    lines = asked()
    assert f"sky cancel --yes {job.name} 7" in lines
    assert not [line for line in lines if line.startswith("sky exec")]
    Path("over").unlink()
    skypilot("RUNNING", exec_code=100)
    with pytest.raises(
        UserFault, match=f"sky exec: exit code 100(.|\\n)*without saving: sky cancel --yes {job.name} 7"
    ):
        command("skypilot", "--job", "stop", config=SKYPILOT)
    assert not [line for line in asked() if line.startswith("sky cancel")]


def test_what_the_login_node_lacks_is_told_before_it_is_submitted() -> None:
    program("sbatch", "echo 1")
    with pytest.raises(UserFault, match=r"none\.jsonl.*\n.*check_here: false"):
        command("slurm", "data.path=none.jsonl")
    assert (asked(), list(Path("runs").glob("*"))) == ([], [])
    done = command("slurm", "--job", "submit", "data.path=none.jsonl", config="check_here: false\n")
    assert (done.exit_code, len(asked())) == (0, 1)


def test_a_program_submits_as_the_command_does() -> None:
    program("sbatch", 'n=$(cat n 2> /dev/null || echo 1); echo "$n"; echo $((n + 1)) > n')
    program("squeue", "echo RUNNING")
    first = api.submit("quickstart", "slurm")
    assert first is not None
    assert (first.folder, first.record.job_id) == (job_of(Scheduler.SLURM).folder, "1")
    assert asked() == [f"sbatch --parsable {first.own_folder / 'job.sh'}"]
    again = api.submit("quickstart", "slurm")
    assert again is not None
    assert (again.folder, again.record.job_id) == (first.folder, "1")
    with pytest.raises(UserFault, match=r"without engines\.count=3"):
        api.submit("quickstart", "slurm", {"engines.count": 3})
    other = api.submit("quickstart", "slurm", {"engines.count": 3}, new=True)
    assert other is not None
    assert other.record.job_id == "2"
    with pytest.raises(UserFault, match="there is no 'pbs'; there are slurm"):
        api.submit("quickstart", cast("Any", "pbs"))
