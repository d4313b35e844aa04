"""When a curve has reached a reward, what a late step takes, and what processes use meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from penstock.benchmarks import learning
from penstock.benchmarks.learning import CpuSamples, Curve, Point
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path


def curve(*rewards: float) -> Curve:
    points = [
        Point(at_s=10.0 + 2.0 * number, cpu_s=5.0 + 3.0 * number, tokens=100 * number, reward=reward)
        for number, reward in enumerate(rewards, start=1)
    ]
    return Curve(arm="sync", seed=0, start_s=10.0, start_cpu_s=5.0, points=points)


def test_a_reward_is_reached_by_the_mean_of_the_last_steps() -> None:
    found = curve(0.9, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5).reached(0.5)
    assert found is not None
    assert found.tokens == 800
    assert curve(0.9, 0.0, 0.0, 0.0, 0.0).reached(0.5) is None
    of_a_short_run = curve(0.2, 0.6).reached(0.4)
    assert of_a_short_run is not None
    assert of_a_short_run.at_s == 14.0


def test_a_late_step_is_a_mean_of_the_second_half() -> None:
    step = curve(*[0.1] * 9).step
    assert (step.at_s, step.cpu_s, step.tokens) == (2.0, 3.0, 100)


def test_cpu_seconds_are_those_of_children_running_and_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    with CpuSamples() as cpu:
        subprocess.run([sys.executable, "-c", burn], check=True)
        child = subprocess.Popen([sys.executable, "-c", f"{burn}print(flush=True)\ninput()"], stdin=-1, stdout=-1)
        assert child.stdout is not None
        child.stdout.readline()
        both_s = time.time() - cpu.began_s
    child.communicate(b"\n", timeout=60)
    assert cpu.at(0.0) < 0.3 < 0.5 < cpu.at(cpu.wall_s) < 5.0
    assert cpu.at(both_s / 2) <= cpu.at(both_s)


def test_without_their_environment_peers_are_said_to_be_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path))
    arms, absent = learning.runnable(("fully_async", "trl"), None)
    assert arms == ["fully_async"]
    (line,) = absent
    assert line.startswith("TRL, skipped: the peers' environment is not built: .ci/set_up peers")


def test_with_no_arm_that_can_run_here_it_says_so_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path))
    with pytest.raises(UserFault, match="nothing to measure: TRL, skipped"):
        learning.main(["--arms", "trl", "--history", str(tmp_path)])
