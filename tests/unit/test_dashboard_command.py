"""``penstock dashboard`` as a process, the page beside a run, and what each actor reported last."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from dashboard_runs import finished_run, recorder_of
from rich.console import Console
from typer.testing import CliRunner

from penstock.messages.base import Metric
from penstock.messages.training import ActorReported
from penstock.runtime.cli.app import app
from penstock.runtime.cli.dashboard import dashboard_beside
from penstock.runtime.cli.program import NICE
from penstock.runtime.launch.runs import open_record
from penstock.runtime.observability.actors_file import ACTORS_FILE, ActorNow, ActorsFile, Loss, read_actors

LATEST_S = 60.0


def dashboard(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.runtime.cli", "dashboard", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "40"},
    )


def status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=LATEST_S) as answer:
        return int(answer.status)


def test_the_command_prints_a_link_on_one_line_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with dashboard(str(finished_run(tmp_path / "run")), "--port", "0") as process:
        assert process.stdout is not None
        link = next(line for line in process.stdout if "#token=" in line).strip()
        assert status(link.split("#")[0]) == 200
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
        process.send_signal(signal.SIGINT)
        assert process.wait(LATEST_S) == 0
        with pytest.raises(urllib.error.URLError):
            status(link.split("#")[0])


def test_a_port_in_use_and_a_folder_without_a_run_are_the_users_to_change(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with dashboard(str(folder), "--port", port) as process:
            _, said = process.communicate(timeout=LATEST_S)
            assert (process.returncode, f"--port {port}" in said, "0 for any" in said) == (2, True, True)
    with dashboard(str(tmp_path)) as process:
        _, said = process.communicate(timeout=LATEST_S)
        assert (process.returncode, "run.json" in said) == (2, True)


def test_a_command_that_is_called_within_another_process_leaves_its_priority_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(increment: int) -> int:
        pytest.fail(f"the priority is changed by {increment}")

    monkeypatch.setattr(os, "nice", refuse)
    told = CliRunner().invoke(app, ["dashboard", str(finished_run(tmp_path / "run")), "--port", "0", "--until-end"])
    assert (told.exit_code, "#token=" in told.output) == (0, True)


def test_the_page_beside_a_run_is_there_while_it_is_driven(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recorder = recorder_of(folder)
    open_record(folder, "run")  # this process drives it
    said = io.StringIO()
    with dashboard_beside(folder, Console(file=said, width=40)):
        link = said.getvalue().removeprefix("dashboard: ").strip()
        assert status(link.split("#")[0]) == 200
        (beside,) = (each for each in psutil.Process().children() if "--until-end" in each.cmdline())
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, beside.pid) == mine + NICE
        groups = Path(f"/proc/{beside.pid}/autogroup")  # not every kernel has it
        assert not groups.exists() or groups.read_text().endswith(f"nice {NICE}\n")
    with pytest.raises(urllib.error.URLError):
        status(link.split("#")[0])
    recorder.abandon()


def test_a_page_that_cannot_be_served_does_not_stop_the_run(tmp_path: Path) -> None:
    said = io.StringIO()
    with dashboard_beside(tmp_path, Console(file=said, width=200)):  # no run is there
        assert "logs/dashboard.log" in said.getvalue()
    assert "run.json" in (tmp_path / "logs" / "dashboard.log").read_text()


# --- what each actor reported last -----------------------------------------------------------------------------------


def report(epoch: int, tokens: float) -> ActorReported:
    metrics = (Metric("engine/generated_tokens", tokens), Metric("engine/running", 2.0))
    return ActorReported(name="engine/0", epoch=epoch, state="serving", metrics=metrics)


def only(folder: Path) -> ActorNow:
    """The one actor that is written down."""
    told = read_actors(folder)
    assert told is not None
    (actor,) = told.actors
    return actor


def test_actors_are_written_at_most_once_a_second_and_at_the_end(tmp_path: Path) -> None:
    clock = [0.0]
    actors = ActorsFile(tmp_path, clock_s=lambda: clock[0])
    for number in range(100):
        clock[0] = number / 10
        actors.actor(report(1, 50.0 * number), 1000.0 + number)
        assert only(tmp_path).metrics["engine/generated_tokens"] == 50.0 * (number - number % 10)
    assert only(tmp_path).rates["engine/generated_tokens"] == pytest.approx(50.0)
    actors.write()
    assert only(tmp_path).metrics["engine/generated_tokens"] == 50.0 * 99
    assert sorted(path.name for path in tmp_path.iterdir()) == [ACTORS_FILE]


def test_a_replacement_counts_from_zero_and_its_predecessor_is_not_heard_any_more(tmp_path: Path) -> None:
    actors = ActorsFile(tmp_path, clock_s=lambda: 0.0)
    for second in range(5):
        actors.actor(report(1, 100.0 * second), float(second))
    actors.lost("engine/0", "its process was killed")
    actor = only(tmp_path)
    assert (actor.is_down, actor.num_restarts) == (True, 1)
    for second in range(5, 10):
        actors.actor(report(2, 10.0 * (second - 5)), float(second))
    actors.actor(report(1, 9999.0), 10.0)
    actors.write()
    actor = only(tmp_path)
    assert (actor.is_down, actor.num_restarts, actor.epoch) == (False, 1, 2)
    assert actor.rates["engine/generated_tokens"] == pytest.approx(10.0)
    told = read_actors(tmp_path)
    assert told is not None
    assert told.losses == [Loss(4.0, "engine/0", "its process was killed")]
