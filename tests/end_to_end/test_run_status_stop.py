"""A run from the command line as its user sees it: begun, looked at, stopped, looked at again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil
import pytest

from penstock.backends.weights.segments import segments_of
from penstock.runtime.launch.runs import read_record
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Generator

PENSTOCK = [sys.executable, "-c", "from penstock.runtime.cli import main; main()"]
SCENARIO = Path(__file__).parents[2] / "scenarios" / "fully_async.yaml"
HOST = os.environ.get("PENSTOCK_TEST_HOST", "local")
ENDLESS = (
    f"runtime.host={HOST}",
    "run.num_steps=100000",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
    "reward.function=random",
    "sampling.samples_per_group=4",
    "sampling.max_response_tokens=16",
)

pytestmark = pytest.mark.timeout(280)

Run = subprocess.Popen[str]


@pytest.fixture
def run(tmp_path: Path) -> Generator[Run]:
    """An endless run below ``tmp_path``; whatever the test leaves of it is killed."""
    process = subprocess.Popen(
        [*PENSTOCK, "run", str(SCENARIO), *ENDLESS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TERM": "dumb"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def penstock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PENSTOCK, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def output_of(run: Run) -> IO[str]:
    assert run.stdout is not None
    return run.stdout


def wait_for(run: Run, word: str) -> None:
    """Read the terminal until a line has this word; the test's own time limit ends the wait."""
    seen: list[str] = []
    for line in output_of(run):
        seen.append(line)
        if word in line:
            return
    raise AssertionError(f"the run ended without saying {word!r}:\n{''.join(seen)}")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything whose command line or working folder has to do with the run."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join([*process.cmdline(), process.cwd()]):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_run_is_seen_while_it_goes_on_and_stopped_with_its_ledger_in_balance(run: Run, tmp_path: Path) -> None:
    wait_for(run, "staleness")
    during = penstock(tmp_path, "status")
    assert during.returncode == 0
    assert f"process {run.pid}" in during.stdout
    assert "balanced" in during.stdout

    stopped = penstock(tmp_path, "stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    rest = output_of(run).read()
    assert run.wait(30) == 128 + signal.SIGTERM
    assert "Traceback" not in rest
    assert rest.splitlines()[-1].startswith("to go on: penstock resume runs/")

    (folder,) = (tmp_path / "runs").iterdir()
    assert read_record(folder).state == "stopped"
    after = penstock(tmp_path, "status")
    assert after.returncode == 1
    assert "stopped after" in after.stdout
    summary = read_summary(folder)
    assert summary is not None
    assert summary.balance.is_balanced
    assert (folder / "report.html").is_file()
    assert not processes_of(tmp_path)
    assert "nothing to stop" in penstock(tmp_path, "stop").stdout


def test_a_run_that_was_interrupted_before_anything_was_recorded_goes_on_by_the_command_that_it_names(
    run: Run, tmp_path: Path
) -> None:
    wait_for(run, "importing what the actors need")  # from here on a signal ends the run in its order
    run.send_signal(signal.SIGINT)
    rest = output_of(run).read()
    assert run.wait(60) == 128 + signal.SIGINT, rest
    *_, recorded, go_on = rest.splitlines()
    assert recorded == "nothing was recorded yet: resumed, it begins from the start"
    command = go_on.removeprefix("to go on: penstock ").split()
    resumed = penstock(tmp_path, *command, "run.num_steps=2")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert [step.version for step in read_steps(folder)] == [1, 2]


@pytest.mark.slow  # `make chaos` kills and resumes whole runs
def test_a_run_that_was_killed_has_vanished_can_be_reported_and_goes_on(run: Run, tmp_path: Path) -> None:
    wait_for(run, "staleness")
    children = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait(30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    status = penstock(tmp_path, "status")
    assert status.returncode == 1
    assert "vanished" in status.stdout
    report = penstock(tmp_path, "report")
    assert report.returncode == 0, report.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").is_file()

    num_steps = read_steps(folder)[-1].version + 3
    resumed = penstock(tmp_path, "resume", f"run.num_steps={num_steps}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    summary = read_summary(folder)
    assert summary is not None
    assert (summary.completed, summary.version) == (True, num_steps)
    assert summary.balance.in_system == 0
    assert not segments_of(folder.name)
    audit = penstock(tmp_path, "audit")
    assert audit.returncode == 0, audit.stdout
