"""The batch script on a real Slurm of two nodes: a run that is submitted, stopped, resumed and completed by the same
command, with a Ray of its own over both nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from slurm_cluster import missing_programs, two_slurm_nodes

from penstock.runtime.launch.runs import audit_run, read_record
from penstock.runtime.launch.status import run_status

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"no Slurm here, {', '.join(missing_programs())} not found: apt-get install slurm-wlm munge",
    ),
]
OVERRIDES = ("learner.warm_start=null", "observability.show_samples=false", "engines.count=1")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with two_slurm_nodes() as environment:
        yield {**environment, "OMP_NUM_THREADS": "1"}


def penstock(folder: Path, slurm: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    words = ["run", "quickstart", "--submit", "slurm", "--submit-config", "slurm.yaml", *OVERRIDES, *more]
    return subprocess.run(
        [sys.executable, "-m", "penstock.runtime.cli", *words],
        cwd=folder, env=slurm, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def config(folder: Path, **keys: object) -> None:
    given = {"partition": "main", "cpus_per_node": 1, "poll_s": 0.5, "time_limit": "20:00", **keys}
    (folder / "slurm.yaml").write_text(yaml.safe_dump(given))


def run_folder(folder: Path) -> Path:
    [found] = folder.glob("*/quickstart-*")
    return found


def await_steps(folder: Path, number: int) -> None:
    end_s = time.monotonic() + 200.0
    while not list(folder.glob("*/quickstart-*/run.json")) or run_status(run_folder(folder)).version < number:
        logs = "\n".join(file.read_text()[-3000:] for file in folder.glob("*/*/job/*.log"))
        assert time.monotonic() < end_s, logs
        time.sleep(0.2)


def test_a_run_over_two_nodes_is_submitted_stopped_and_completed_by_the_same_command(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    config(tmp_path, nodes=2)
    folder = "run.folder=my runs, 100% mine"  # a name that Slurm would expand
    begun = penstock(tmp_path, slurm, folder, "run.num_steps=500", "--job", "submit")
    assert begun.returncode == 0, begun.stderr
    await_steps(tmp_path, 2)
    run = run_folder(tmp_path)
    assert (
        "is there already (RUNNING)" in penstock(tmp_path, slurm, folder, "run.num_steps=500", "--job", "submit").stdout
    )
    assert penstock(tmp_path, slurm, folder, "run.num_steps=500", "--job", "status").returncode == 0
    stopped = penstock(tmp_path, slurm, folder, "run.num_steps=500", "--job", "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert read_record(run).state == "stopped", "cleanly, and not by Slurm"
    assert list(run.glob("checkpoints/version-*"))
    reached = run_status(run).version
    resumed = penstock(tmp_path, slurm, folder, f"run.num_steps={reached + 3}")
    assert resumed.returncode == 0, resumed.stdout[-4000:] + resumed.stderr
    assert "in which the run goes on" in resumed.stdout
    assert read_record(run).state == "completed"
    assert [drive.state for drive in read_record(run).earlier] == ["stopped"]
    assert not audit_run(run).findings
    again = penstock(tmp_path, slurm, folder, f"run.num_steps={reached + 3}")
    assert (again.returncode, "completed; to train more" in again.stdout) == (0, True)
    check_ray(run, Path(slurm["TMPDIR"]))


def check_ray(run: Path, temp: Path) -> None:
    """Each attempt had a Ray of two nodes, in ports of its own, and nothing is left of it."""
    addresses = {json.loads(file.read_text())["address"] for file in run.glob("job/ray-*/cluster.json")}
    tokens = {json.loads(file.read_text())["token"] for file in run.glob("job/ray-*/cluster.json")}
    assert len(tokens) == 2
    assert all(20000 <= int(address.rpartition(":")[2]) <= 31999 for address in addresses)
    assert all(len(list(folder.glob("*.log"))) == 2 for folder in run.glob("job/ray-*"))
    nodes = re.findall(r"is process \d+ on node (\w+)", (run / "logs" / "driver.log").read_text())
    assert nodes
    end_s = time.monotonic() + 30.0
    while left := [*processes_that_name(str(run)), *(path.name for path in temp.glob("ps-*/r"))]:
        assert time.monotonic() < end_s, left
        time.sleep(0.2)


def processes_that_name(text: str) -> list[str]:
    """Command lines and environments of processes in which the text stands."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words and int(pid) != os.getpid():
            found.append(words)
    return found


def test_what_is_missing_ends_the_job_before_ray_is_started(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "label": "x"}\n')
    config(tmp_path, nodes=2, setup=[f"rm -f {tmp_path}/rows.jsonl"])
    ended = penstock(tmp_path, slurm, "data.path=rows.jsonl")
    assert ended.returncode == 1, ended.stdout
    assert "rows.jsonl" in ended.stdout
    assert "exit code 2" in ended.stdout
    assert not list(run_folder(tmp_path).glob("job/ray-*"))


def test_at_its_time_limit_a_job_saves_is_queued_again_and_goes_on(tmp_path: Path, slurm: dict[str, str]) -> None:
    config(tmp_path, requeue=True, time_limit="1:00", stop_before_s=1)  # Slurm's clock for this has a minute's grain
    begun = penstock(tmp_path, slurm, "run.num_steps=100000", "--job", "submit")
    assert begun.returncode == 0, begun.stderr
    await_steps(tmp_path, 1)
    run = run_folder(tmp_path)
    job_id = json.loads((run / "job/job.json").read_text())["job_id"]
    subprocess.run(("scancel", "--batch", "--signal=USR1", job_id), env=slurm, timeout=30, check=True)
    end_s = time.monotonic() + 240.0
    while not read_record(run).earlier:
        assert time.monotonic() < end_s, (run / f"job/{job_id}.log").read_text()[-3000:]
        time.sleep(0.5)
    assert read_record(run).earlier[0].state == "stopped"
    assert penstock(tmp_path, slurm, "run.num_steps=100000", "--job", "stop").returncode == 0
    assert read_record(run).state == "stopped"
