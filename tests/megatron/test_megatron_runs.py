"""Whole runs on Ray whose learner is megatron-core: they learn, survive the loss of a rank, change their layout.

A run is endless, and ended by its test when what is asked has come about: how fast servers start and steps are depends
on the machine.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun
from test_rank_runs import is_alive

from penstock.backends.data.demonstrations import load_demonstrations
from penstock.backends.learners.options import WarmStartOptions
from penstock.backends.learners.torch.made_teacher import make_teacher
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.names import LEARNER
from penstock.runtime.chaos.faults import plan_faults
from penstock.runtime.cli.chaos import play
from penstock.runtime.observability.trackers import read_run_events, read_steps
from penstock.runtime.run.wiring import actor_names
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from penstock.backends.checkpoint.make import ModelSize
    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import StepRow

pytestmark = [pytest.mark.megatron, pytest.mark.ray, pytest.mark.timeout(660)]

REWARD = "rollout/raw_reward"
WINDOW = 8
RISE = 0.08
"""Of the mean reward of ``WINDOW`` batches: about three times its standard error."""
WAIT_S = 360.0
"""As many seconds as a machine with other work may need; alone it takes a quarter of that."""
RESUMED_EPOCH = 1001
"""Of the first learner after ``penstock resume``."""
LOGPROB_TOLERANCE = 1e-4
"""Between server and learner, in float32."""
SMALL = (
    "run.num_steps=100000",
    "run.seed=3",
    "learner.save_every=5",
    "sampling.max_response_tokens=64",
    "engines.start_timeout_s=300",
    "runtime.heartbeat_timeout_s=60",  # a test machine may be busy with other things
)
CHAOS = """
run: {name: chaos, num_steps: 16, seed: 5}
model: {make: xs}
data: {path: lines:2000}
sampling: {samples_per_group: 4, max_response_tokens: 24}
reward: {function: random}
filter: {drop_zero_spread: false}
staleness: {policy: fully_async, max_staleness: 2}
learner:
  backend: megatron
  num_ranks: 2
  groups_per_batch: 4
  learning_rate: 1e-5
  save_every: 3
  megatron: {pipeline_parallel: 2}
runtime: {heartbeat_timeout_s: 60}
observability: {report: false, tracing: false}
"""
_READY = re.compile(r"rank (\d+) \(process (\d+)\) is ready")


def ranks_of(run: LiveRun, epoch: int = 1) -> dict[int, int]:
    """Pid by rank, of those of an incarnation that are ready."""
    path = run.folder / "logs" / f"{LEARNER}-{epoch}.log"
    return {int(rank): int(pid) for rank, pid in _READY.findall(path.read_text())} if path.exists() else {}


def opened_at(folder: Path) -> list[int]:
    """The version that each incarnation of the learner began with, as the Buffer heard; it announces itself before it
    has one."""
    rows = [row for row in read_run_events(folder) if (row.actor, row.event) == ("buffer", "LearnerReady")]
    versions = [int(row.summary.removeprefix("step ")) for row in rows]
    return [version for version in versions if version >= 0]


def rise(steps: list[StepRow]) -> float:
    """How much more the last batches earned than the first ones."""
    rewards = [reward for step in steps if (reward := step.metrics[REWARD]) is not None]
    assert len(rewards) == len(steps)
    return statistics.fmean(rewards[-WINDOW:]) - statistics.fmean(rewards[:WINDOW])


def await_rise(run: LiveRun, *, since: int = 0) -> None:
    """Until the reward has risen, by batches that were all trained after this many steps."""
    deadline_s = time.monotonic() + WAIT_S
    run.await_steps(max(2 * WINDOW, since + WINDOW))
    while rise(steps := read_steps(run.folder)) < RISE:
        rewards = [step.metrics[REWARD] for step in steps]
        assert run.process.poll() is None, run.ending
        assert time.monotonic() < deadline_s, f"{rewards}\n{run.ending}"
        time.sleep(0.2)  # between two looks at a file; nothing is timed by it


def lose_rank(run: LiveRun, lost: int = 1) -> int:
    """SIGKILL of the last rank once there is a checkpoint of training; how many steps there were."""
    run.await_steps(7)
    ranks = ranks_of(run)
    assert ranks.keys() == set(range(lost + 1)), run.ending
    os.kill(ranks[lost], signal.SIGKILL)
    return len(read_steps(run.folder))


def assert_rank_was_lost(run: LiveRun, summary: RunSummary, lost: int = 1) -> None:
    """The learner was replaced once, from a checkpoint that is not the first, and no step is missing or doubled."""
    log = (run.folder / "logs" / "driver.log").read_text()
    ranks = ranks_of(run)
    assert f"rank {lost} (process {ranks[lost]}) was killed by SIGKILL" in log
    assert [(restart.name, restart.count) for restart in summary.restarts] == [(LEARNER, 1)]
    first, second = opened_at(run.folder)
    assert (first, second % 5) == (0, 0)
    assert second >= 5
    assert not [pid for pid in (*ranks.values(), *ranks_of(run, epoch=2).values()) if is_alive(pid)]


def assert_accounted_for(run: LiveRun, summary: RunSummary, *, bound: int) -> list[StepRow]:
    """Every sample is, no version is missing, none was trained too old."""
    steps = read_steps(run.folder)
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    assert audit_ledger(run.folder / LEDGER_FILE).findings == ()
    assert summary.max_staleness <= bound
    return steps


def imitator(size: ModelSize, folder: Path) -> list[str]:
    """Overrides for a model that has imitated the task for a while: some of its answers earn a reward."""
    make_teacher(
        size,
        folder,
        seed=3,
        block=WarmStartOptions(path="lines:4000", num_steps=150, learning_rate=4e-3),
        load_demonstrations=lambda tokenizer: load_demonstrations(
            "lines:4000", "prompt", "response", tokenizer, seed=3
        ),
        report=lambda _fraction, _loss: None,
    )
    return ["model.make=null", f"model.path={folder}", "learner.warm_start=null"]


def test_the_quickstart_survives_the_loss_of_a_rank_and_goes_on_in_another_layout(tmp_path: Path) -> None:
    with LiveRun("megatron_cpu.yaml", tmp_path, SMALL, timeout_s=WAIT_S) as run:
        num_steps = lose_rank(run)
        await_rise(run, since=num_steps)
        summary = run.interrupt()
        assert_rank_was_lost(run, summary)
        before = assert_accounted_for(run, summary, bound=2)
    layout = ("learner.num_ranks=1", "learner.megatron.tensor_parallel=1")
    with LiveRun.resumed(run.folder, layout) as again:
        again.await_steps(len(before) + 4)
        assert ranks_of(again, epoch=RESUMED_EPOCH).keys() == {0}
        summary = again.interrupt()
        after = assert_accounted_for(again, summary, bound=2)
    assert opened_at(again.folder)[-1] > 0
    rewards = [step.metrics[REWARD] or 0.0 for step in after]
    assert statistics.fmean(rewards[len(before) :]) > statistics.fmean(rewards[:WINDOW])


IN_STEP = (
    *SMALL,
    "staleness.policy=sync",  # so that every token is trained by the weights that made it
    "staleness.max_staleness=0",
    "engines.count=1",
    "learner.backend=megatron",
    "learner.num_ranks=2",
    "learner.device=cpu",
    "learner.megatron.pipeline_parallel=2",
)


def test_stages_and_a_server_agree_on_every_token(servers: None, tmp_path: Path) -> None:
    overrides = (*IN_STEP, "learner.warm_start=null", "learner.groups_per_batch=4")
    with LiveRun("sglang_cpu.yaml", tmp_path, overrides, timeout_s=WAIT_S) as run:
        run.await_steps(5)
        assert_agreed(run)


# What it learns by is covered by the run above, and by test_megatron_trainer.py under every layout.
@pytest.mark.slow
def test_stages_and_a_server_agree_on_every_token_and_learn(servers: None, tmp_path: Path) -> None:
    overrides = (*IN_STEP, *imitator("m", tmp_path / "model"))
    with LiveRun("sglang_cpu.yaml", tmp_path, overrides, timeout_s=WAIT_S) as run:
        await_rise(run)
        assert_agreed(run)


def assert_agreed(run: LiveRun) -> None:
    """The run is ended; server and learner gave each token the same log-prob."""
    summary = run.interrupt()
    assert_accounted_for(run, summary, bound=0)
    assert summary.restarts == ()
    assert summary.max_logprob_abs_diff is not None
    assert summary.max_logprob_abs_diff <= LOGPROB_TOLERANCE


# The loss of a rank is covered by the first run of this file, experts that are divided by test_megatron_moe.py, their
# weights on the way out by test_megatron_publishing.py, and in a server by tests/sglang/test_conformance.py.
@pytest.mark.slow
def test_divided_experts_and_a_server_survive_the_loss_of_a_rank(servers: None, tmp_path: Path) -> None:
    overrides = (*SMALL, *imitator("moe_xs", tmp_path / "model"))
    with LiveRun("megatron_moe_cpu.yaml", tmp_path, overrides, timeout_s=WAIT_S) as run:
        num_steps = lose_rank(run)
        await_rise(run, since=num_steps)
        summary = run.interrupt()
        assert_rank_was_lost(run, summary)
        assert_accounted_for(run, summary, bound=2)


# That ranks notice the death of the critic's, and go on from a checkpoint, is covered by test_megatron_critic_ranks.py.
@pytest.mark.slow
def test_the_loss_of_the_critics_rank_is_made_good(tmp_path: Path) -> None:
    parts = ("learner.num_ranks=3", "learner.critic_ranks=1", "learner.megatron.tensor_parallel=1")
    overrides = (*SMALL, "learner.objective=ppo", "learner.warm_start=null", *parts)
    with LiveRun("megatron_cpu.yaml", tmp_path, overrides, timeout_s=WAIT_S) as run:
        num_steps = lose_rank(run, 2)
        run.await_steps(num_steps + 4)
        summary = run.interrupt()
        assert_rank_was_lost(run, summary, 2)
        assert_accounted_for(run, summary, bound=2)


# A rank that is killed is covered by the first run of this file, one that is stopped by
# tests/integration/test_rank_runs.py, and faults of every part of a run by `make chaos`.
@pytest.mark.slow
def test_chaos_among_the_stages_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chaos.yaml"
    path.write_text(CHAOS)
    overrides = [f"run.folder={tmp_path}"]
    scenario = load_scenario(path, overrides)
    faults = plan_faults(
        ["kill:learner/1@0.3", "stop:learner/1@0.6+1"],
        num_faults=None,
        seed=5,
        names=actor_names(scenario),
        num_ranks=2,
    )
    verdict = play(scenario, path, overrides, faults, seed=5, timeout_s=WAIT_S)
    assert verdict.is_clean, verdict
    assert verdict.version == verdict.num_steps == 16
    assert verdict.issued == verdict.trained == 16 * 16
    assert verdict.restarts == {LEARNER: 1}, "a short stop is forgiven"
