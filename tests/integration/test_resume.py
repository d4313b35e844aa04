"""``penstock resume`` on real processes: after the death of driver and launcher, after a stop, against another one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.processes.process_facts import is_running
from penstock.backends.weights.segments import segments_of
from penstock.messages.ledger import CheckpointRecorded, GroupsGranted, PolicyRecorded, StepRecorded
from penstock.runtime.hosts.processes.leftovers import processes_of
from penstock.runtime.launch.control import SwitchPolicy, send_command
from penstock.runtime.launch.runs import read_record
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import event_file, read_activity, read_events, read_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.messages.ledger import LedgerEntry

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(780)]

SCENARIO = """
run: {name: simulated, num_steps: 16}
model: {max_context: 4096}
data: {path: lines:1000}
sampling: {samples_per_group: 2, max_response_tokens: 256}
staleness: {policy: fully_async, max_staleness: 2}
filter: {drop_zero_spread: false}
engines:
  backend: simulated
  count: 2
  slots: 8
  simulated: {response_tokens_median: 40, response_tokens_sigma: 0.5, token_s: 0.004}
learner:
  backend: simulated
  groups_per_batch: 4
  save_every: 4
  simulated: {step_s: 0.3, publish_s: 0.05}
runtime: {heartbeat_timeout_s: 60}
"""
NUM_STEPS = 16
DEADLINE_S = 60.0


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a failed test leaves of its own runs is killed; a test that passed has left nothing."""
    yield
    left = {folder.parent: processes_of(folder.parent.name, folder.parent) for folder in tmp_path.glob("*/run.json")}
    for pids in left.values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert not any(left.values())
    assert not [segment for folder in left for segment in segments_of(folder.name)]


def entries_of(folder: Path) -> list[LedgerEntry]:
    reader = SqliteReader(folder / LEDGER_FILE)
    try:
        return list(reader.entries())
    finally:
        reader.close()


def trained_versions(folder: Path) -> list[int]:
    return [entry.version for entry in entries_of(folder) if isinstance(entry, StepRecorded)]


def has_trained_beyond(folder: Path, version: int) -> bool:
    return max(trained_versions(folder), default=0) > version


def claims_of(folder: Path) -> int:
    reader = SqliteReader(folder / LEDGER_FILE)
    try:
        return reader.claimed_epoch()
    finally:
        reader.close()


def driver_of(folder: Path) -> int:
    """The process that supervises the run."""
    (pid,) = [
        pid
        for pid in processes_of(folder.name, folder)
        if b"penstock.runtime.hosts.driver.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.runtime.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def assert_complete(folder: Path, num_steps: int = NUM_STEPS) -> None:
    """The run is whole, over however many drives."""
    summary = read_summary(folder)
    assert summary is not None
    assert summary.completed
    assert summary.version == num_steps
    assert summary.balance.is_balanced
    assert summary.balance.in_system == 0
    assert trained_versions(folder) == list(range(1, num_steps + 1))  # each once, whatever was trained again
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    shown = [row.version for row in read_steps(folder)]
    assert shown == sorted(set(shown))
    assert shown[-1] == num_steps
    assert summary.tokens_trained <= summary.tokens_generated
    for lane in read_activity(folder).values():
        assert all(after.start_s >= before.end_s - 1e-6 for before, after in pairwise(lane))


def test_a_run_goes_on_after_the_death_of_its_driver_and_then_of_its_launcher(scenario: Path, tmp_path: Path) -> None:
    with LiveRun(scenario, tmp_path, ()) as run:
        run.await_steps(5)
        folder = run.folder
        os.kill(driver_of(folder), signal.SIGKILL)
        assert run.process.wait(DEADLINE_S) == 128 + signal.SIGKILL
        assert f"penstock resume {folder}" in run.output.splitlines()[-1]
    with LiveRun.resumed(folder) as again:
        again.await_steps(10)
        again.process.kill()
        again.process.wait()
        status = penstock("status", str(folder))
        assert "vanished" in status.stdout
        assert "drive 2 of this run; before: 1 failed" in status.stdout
    with LiveRun.resumed(folder) as last:
        last.finish()
    assert_complete(folder)
    assert claims_of(folder) == 2001
    record = read_record(folder)
    assert [drive.state for drive in record.earlier] == ["failed", "running"]
    assert [drive.exit_code for drive in record.earlier] == [128 + signal.SIGKILL, None]


def test_a_stop_leaves_a_checkpoint_and_nothing_is_trained_again(scenario: Path, tmp_path: Path) -> None:
    with LiveRun(scenario, tmp_path, ("learner.save_every=1000",)) as run:
        run.await_steps(3)
        folder = run.folder
        run.process.terminate()
        assert run.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert "a checkpoint is written first" in run.output
    num_trained = max(trained_versions(folder))
    checkpoints = [entry.version for entry in entries_of(folder) if isinstance(entry, CheckpointRecorded)]
    assert checkpoints == [num_trained]
    assert read_record(folder).state == "stopped"

    with LiveRun.resumed(folder) as again:
        again.finish()
    assert_complete(folder)
    events = [row.event for row in read_events(event_file(folder, "learner", 1001))]
    assert events.count("BatchTrained") == NUM_STEPS - num_trained

    done = penstock("resume", str(folder))
    assert done.returncode == 0
    assert "completed; to train more, raise run.num_steps" in done.stdout.replace("\n", " ")
    with LiveRun.resumed(folder, (f"run.num_steps={NUM_STEPS + 3}",)) as more:
        more.finish()
    assert_complete(folder, NUM_STEPS + 3)


def test_a_stopped_launcher_and_driver_are_taken_over_and_never_come_back(scenario: Path, tmp_path: Path) -> None:
    with LiveRun(scenario, tmp_path, ("run.num_steps=100000",)) as run:
        run.await_steps(3)
        folder = run.folder
        refused = penstock("resume", str(folder))
        assert refused.returncode == 2
        assert f"is running, driven by process {run.process.pid}" in refused.stderr
        members = processes_of(folder.name, folder)
        os.kill(run.process.pid, signal.SIGSTOP)
        os.kill(driver_of(folder), signal.SIGSTOP)
        claimed = claims_of(folder)
        assert "is stopped" in penstock("status", str(folder)).stdout
        with LiveRun.resumed(folder, (f"run.num_steps={NUM_STEPS + 20}",)) as again:
            assert run.process.wait(DEADLINE_S) == -signal.SIGKILL
            until(lambda: not any(is_running(pid, ticks) for pid, ticks in members.items()))
            again.finish()
    assert claims_of(folder) == 1001 > claimed
    assert_complete(folder, NUM_STEPS + 20)


def test_of_two_resumes_at_once_one_drives_and_the_other_is_refused(scenario: Path, tmp_path: Path) -> None:
    with LiveRun(scenario, tmp_path, ()) as run:
        run.await_steps(2)
        folder = run.folder
        run.process.kill()
        run.process.wait()
    with LiveRun.resumed(folder) as one, LiveRun.resumed(folder) as other:
        until(lambda: one.process.poll() is not None or other.process.poll() is not None)
        loser, winner = (one, other) if one.process.poll() is not None else (other, one)
        assert loser.process.returncode == 2, loser.ending
        assert "another penstock drives this run" in loser.output or "is running" in loser.output
        winner.finish()
    assert_complete(folder)


def test_a_switch_outlives_the_driver_and_all_actors(scenario: Path, tmp_path: Path) -> None:
    with LiveRun(scenario, tmp_path, ("staleness.policy=sync", "staleness.max_staleness=null")) as run:
        run.await_steps(2)
        folder = run.folder
        answer = send_command(folder, SwitchPolicy("fully_async", {"max_staleness": 3}), DEADLINE_S)
        assert answer.accepted, answer.text
        run.await_steps(5)
        members = processes_of(folder.name, folder)
        assert len(members) > 7, "the driver and the actors at least"
        for pid in (run.process.pid, *members):
            with suppress(ProcessLookupError):  # what a guardian has ended by now
                os.kill(pid, signal.SIGKILL)
        run.process.wait(DEADLINE_S)
    (switch,) = [entry for entry in entries_of(folder) if isinstance(entry, PolicyRecorded)]
    assert "policy since step" in penstock("status", str(folder)).stdout
    with LiveRun.resumed(folder) as again:
        summary = again.finish()
    assert_complete(folder)
    assert [entry for entry in entries_of(folder) if isinstance(entry, PolicyRecorded)] == [switch]
    bounds = [entry.max_staleness for entry in entries_of(folder) if isinstance(entry, GroupsGranted)]
    assert bounds == sorted(bounds)
    assert set(bounds) == {0, 3}
    policies = [row.policy for row in read_steps(folder)]
    assert policies == sorted(policies, reverse=True)
    assert policies[-1] == "fully_async"
    first, held = summary.policies
    assert (first.from_step, first.policy, held.policy, held.max_staleness) == (1, "sync", "fully_async", 3)
    assert policies.index("fully_async") + 1 >= held.from_step > 2
    assert summary.max_staleness <= 3


@pytest.mark.parametrize("victim", ["buffer", "learner"])
def test_a_lost(victim: str, scenario: Path, tmp_path: Path) -> None:
    with LiveRun(scenario, tmp_path, ()) as run:
        run.await_steps(6)
        os.kill(run.pid_of(victim), signal.SIGKILL)
        summary = run.finish()
    assert [restart.name for restart in summary.restarts] == [victim]
    assert_complete(run.folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_deaths_of_the_driver_in_one_run(scenario: Path, tmp_path: Path) -> None:
    """Killed at random moments, a quarter of them while it starts; each drive goes on where the ledger ends."""
    draw = random.Random(7)
    with LiveRun(scenario, tmp_path, ("run.num_steps=100000",)) as run:
        until(lambda: bool(list(tmp_path.glob("*/run.json"))))
        folder = run.folder
    for number in range(20):
        before = max(trained_versions(folder), default=0)
        with LiveRun.resumed(folder) as run:
            until(lambda: bool(processes_of(folder.name, folder)))
            if number % 4:
                until(partial(has_trained_beyond, folder, before))
            time.sleep(draw.uniform(0.0, 8.0))  # the moment is what is drawn here
            assert run.process.poll() is None, run.ending
            os.kill(driver_of(folder), signal.SIGKILL)
            assert run.process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    num_steps = max(trained_versions(folder), default=0) + 10
    with LiveRun.resumed(folder, (f"run.num_steps={num_steps}",)) as run:
        run.finish()
    assert_complete(folder, num_steps)
    assert claims_of(folder) >= 21_000


def test_the_temporary_folder_of_a_killed_run_is_removed_by_the_next_one(scenario: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "killed", tmp_path / "living", tmp_path / "next"]
    for folder in runs:
        folder.mkdir()
    endless = ("run.num_steps=100000",)
    with LiveRun(scenario, runs[0], endless) as killed, LiveRun(scenario, runs[1], endless) as living:
        killed.await_steps(2)
        living.await_steps(2)
        dead, used = (Path(read_record(run.folder).temp_folder) for run in (killed, living))
        for pid in (killed.process.pid, *processes_of(killed.folder.name, killed.folder)):
            with suppress(ProcessLookupError):  # what a guardian has ended by now
                os.kill(pid, signal.SIGKILL)
        killed.process.wait()
        assert dead.is_dir()
        with LiveRun(scenario, runs[2], ()) as last:
            last.finish()
        assert (dead.exists(), used.is_dir()) == (False, True)
        living.interrupt()
    assert not used.exists()
