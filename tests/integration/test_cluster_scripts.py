"""What pods of Kubernetes and nodes of SkyPilot are told to run, run by bash here: the variables that both set, a
shared folder, two nodes, and a small scenario to its end. (Slurm's own script runs on a Slurm in ``test_slurm.py``.)"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from short_runs import ONE_SMALL_ENGINE

from penstock.runtime.launch.runs import read_record
from penstock.runtime.launch.status import run_status

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
NODE = (sys.executable, "-m", "penstock.runtime.hosts.ray.node")
SMALL = (*ONE_SMALL_ENGINE, "run.num_steps=2")


@pytest.fixture
def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def written(scheduler: str, folder: Path, config: str, environment: Mapping[str, str]) -> str:
    (folder / "submit.yaml").write_text(config)
    words = ["run", "quickstart", "--submit", scheduler, "--submit-config", "submit.yaml", "--dry-run", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.cli", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def bash(script: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def check_completed(shared: Path) -> None:
    [run] = shared.glob("quickstart-*")
    assert read_record(run).state == "completed"
    assert run_status(run).version == 2


@pytest.mark.slow
def test_two_nodes_of_skypilot_run_a_scenario_to_its_end(tmp_path: Path, environment: dict[str, str]) -> None:
    shared = tmp_path / "shared"
    task = yaml.safe_load(written("skypilot", tmp_path, f"shared_folder: {shared}\nnodes: 2\n", environment))
    with ExitStack() as stack:
        nodes: list[subprocess.Popen[str]] = []
        for rank in (1, 0):
            variables = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_TASK_ID": "sky-2026-01-01_mine_1"}
            nodes.append(bash(task["run"], tmp_path, environment | variables))
            stack.callback(nodes[-1].wait, 30)
            stack.callback(nodes[-1].send_signal, signal.SIGTERM)
        output = nodes[1].communicate(timeout=200)[0]
        assert nodes[1].returncode == 0, output[-4000:]
        assert nodes[0].wait(60) == 0, "a node ends well when the job has ended"
    check_completed(shared)


def test_the_entry_point_of_a_rayjob_runs_a_scenario_to_its_end(tmp_path: Path, environment: dict[str, str]) -> None:
    shared, mounted, cluster = tmp_path / "shared", tmp_path / "mounted", tmp_path / "cluster"
    config = f"image: penstock\nvolume_claim: runs\nshared_folder: {shared}\nnodes: 1\n"
    secret, job = yaml.safe_load_all(written("rayjob", tmp_path, config, environment))
    assert job["spec"]["entrypoint"] == "bash /etc/penstock/run.sh"
    mounted.mkdir()
    for name, text in secret["stringData"].items():
        (mounted / name).write_text(text)
    head = subprocess.Popen((*NODE, "head", str(cluster)), env=environment, stdin=subprocess.DEVNULL)
    try:
        subprocess.run((*NODE, "with", str(cluster), "--", "true"), env=environment, timeout=100, check=True)
        found = json.loads((cluster / "cluster.json").read_text())
        of_pod = {"RAY_ADDRESS": found["address"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": found["token"]}
        script = (mounted / "run.sh").read_text().replace("/etc/penstock", str(mounted))
        done = bash(script, tmp_path, environment | of_pod)
        output = done.communicate(timeout=200)[0]
        assert done.returncode == 0, output[-4000:]
        check_completed(shared)
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(30)
