"""However a run ends, nothing of it is left, the exit code says how, and the terminal shows the story and no more."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
from host_echo import NAMES, RunPlan
from host_harness import HOST
from host_launched import END_DEADLINE_S, Launched, environment_of

from penstock.backends.processes.process_facts import start_ticks_of
from penstock.runtime.hosts.driver.launcher import NO_BYTECODE_VARIABLE
from penstock.runtime.observability.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(300)

ENDLESS = RunPlan(num_groups=1_000_000, tick_s=0.02)
FIRST_MEMBER = {"ray": "gcs_server", "local": "hosts.local.zygote"}[HOST]
"""What is there as soon as the host starts."""
ON_RAY = '{"runtime": {"host": "ray"}}'
LOCAL = '{"runtime": {"host": "local"}}'


@pytest.mark.smoke
@pytest.mark.both_hosts
def test_a_run_that_completes(launched: Callable[..., Launched]) -> None:
    run = launched(RunPlan(num_groups=30))
    assert run.end() == (0, "")
    run.assert_nothing_is_left()
    summary = read_summary(run.folder)
    assert summary is not None
    assert (summary.completed, summary.version) == (True, 30)
    assert (run.folder / "report.html").exists()


@pytest.mark.both_hosts
@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("launcher", signal.SIGINT),
        pytest.param("launcher", signal.SIGTERM, marks=pytest.mark.slow),
        ("driver", signal.SIGTERM),
    ],
    ids=str,
)
def test_a_signal_stops_the_run_cleanly(launched: Callable[..., Launched], target: str, number: signal.Signals) -> None:
    run = launched(ENDLESS)
    run.wait_for_steps()
    os.kill(run.process.pid if target == "launcher" else run.pid_of("hosts.driver.main"), number)
    assert run.end() == (128 + number, f"penstock: stopped by {number.name}\n")
    run.assert_nothing_is_left()
    summary = read_summary(run.folder)
    assert summary is not None  # the Buffer has closed its books
    assert not summary.completed
    assert summary.version > 3
    assert summary.balance.is_balanced


def test_a_supervisor_that_was_stopped_itself_blames_nobody(launched: Callable[..., Launched]) -> None:
    run = launched(ENDLESS, '{"runtime": {"heartbeat_s": 0.2, "heartbeat_timeout_s": 10}}')
    run.wait_for_steps()
    driver = run.pid_of("hosts.driver.main")
    os.kill(driver, signal.SIGSTOP)
    time.sleep(12.0)  # longer than every deadline that it watches
    os.kill(driver, signal.SIGCONT)
    run.wait_for_steps(more=100)
    log = (run.folder / "logs" / "driver.log").read_text()
    assert "the supervisor was asleep for" in log
    assert "is lost" not in log
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "penstock: stopped by SIGINT\n")


def test_a_second_signal_does_not_wait_for_anybody(launched: Callable[..., Launched]) -> None:
    run = launched(RunPlan(num_groups=1_000_000, closes_books=False, stubborn="filter"))
    run.wait_for_steps()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    run.assert_nothing_is_left()


@pytest.mark.both_hosts
def test_a_signal_while_the_host_starts(launched: Callable[..., Launched]) -> None:
    run = launched(ENDLESS)
    run.wait_for_member(FIRST_MEMBER)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (128 + signal.SIGINT, "penstock: stopped by SIGINT\n")
    run.assert_nothing_is_left()


@pytest.mark.both_hosts
def test_the_driver_is_killed(launched: Callable[..., Launched]) -> None:
    run = launched(ENDLESS)
    run.wait_for_steps()
    os.kill(run.pid_of("hosts.driver.main"), signal.SIGKILL)
    log = run.folder / "logs" / "driver.log"
    story = f"penstock: the driver was killed by SIGKILL; {log} may say why\n"
    assert run.end() == (128 + signal.SIGKILL, story)
    run.assert_nothing_is_left()


@pytest.mark.ray
@pytest.mark.parametrize("part", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
def test_a_part_of_ray_is_killed(launched: Callable[..., Launched], part: str) -> None:
    run = launched(ENDLESS, ON_RAY)
    run.wait_for_steps()
    os.kill(run.pid_of(f"{part}/{part}" if part == "raylet" else f"gcs/{part}"), signal.SIGKILL)
    story = f"penstock: Ray's {part} has died (killed by signal 9), and no actor lives without it\n"
    assert run.end() == (1, story)
    run.assert_nothing_is_left()
    summary = read_summary(run.folder)
    assert summary is not None  # from what was reported before
    assert summary.version > 3


def test_the_process_that_actors_are_forked_from_is_killed(launched: Callable[..., Launched]) -> None:
    run = launched(ENDLESS, LOCAL)
    run.wait_for_steps()
    forked = [pid for pid, command in run.members().items() if "hosts.local.zygote" in command]
    zygote = min(forked, key=start_ticks_of)
    assert len(forked) == 1 + len(NAMES)
    os.kill(zygote, signal.SIGKILL)
    story = "penstock: the process that actors are forked from was killed by SIGKILL\n"
    assert run.end() == (1, story)
    run.assert_nothing_is_left()
    summary = read_summary(run.folder)
    assert summary is not None  # from what was reported before
    assert summary.version > 3


@pytest.mark.both_hosts
@pytest.mark.parametrize("moment", ["while the host starts", "while the actors run"])
def test_the_launcher_is_killed(launched: Callable[..., Launched], moment: str) -> None:
    run = launched(ENDLESS)
    if moment == "while the host starts":
        run.wait_for_member(FIRST_MEMBER)
    else:
        run.wait_for_steps()
    run.process.kill()
    run.process.communicate()
    end_s = time.monotonic() + END_DEADLINE_S
    while run.members() or run.temp_folder.exists():
        assert time.monotonic() < end_s, f"still there: {run.members()}, {run.temp_folder}"
        time.sleep(0.05)


def test_what_the_user_has_to_mend_is_told_once(launched: Callable[..., Launched]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = launched(RunPlan(num_groups=30), f'{{"observability": {{"metrics_port": {port}}}}}')
        code, stderr = run.end()
    assert code == 2
    assert stderr.startswith(f"penstock: observability.metrics_port: port {port} on 127.0.0.1 is in use")
    assert stderr.count("\n") == 1
    run.assert_nothing_is_left()


def test_a_failed_run_exits_with_one(launched: Callable[..., Launched]) -> None:
    run = launched(RunPlan(fail_after=5))
    assert run.end() == (1, "penstock: the Buffer has seen enough\n")
    run.assert_nothing_is_left()


@pytest.mark.ray
def test_processes_keep_bytecode_and_ray_runs_without_its_dashboard(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NO_BYTECODE_VARIABLE, "1")
    run = launched(ENDLESS, ON_RAY)
    run.wait_for_steps()
    members = run.members()
    assert sum("ray::ActorProcess" in command for command in members.values()) >= len(NAMES)
    kept = [command for pid, command in members.items() if NO_BYTECODE_VARIABLE.encode() in environment_of(pid)]
    assert kept == []
    assert [command for command in members.values() if "dashboard/dashboard.py" in command] == []
