"""Whole runs on Ray and ZMQ with the embedded engine and learner."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import SMALL_BATCHES

from penstock.messages.training import OnStale
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.observability.summary import RunSummary

pytestmark = pytest.mark.timeout(300)

SMALL = (*SMALL_BATCHES, "run.num_steps=6", "learner.warm_start.num_steps=10")
BOUNDS = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def assert_nothing_lost(summary: RunSummary) -> None:
    """The ledger balances and nothing is left in the system or was thrown away for its age."""
    balance = summary.balance
    assert summary.completed
    assert balance.in_system == 0
    assert balance.issued == sum(count.num_samples for count in balance.ended)
    assert not [count for count in balance.ended if count.state == "stale"]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("sync", marks=pytest.mark.long_run),
        pytest.param("one_step_off", marks=pytest.mark.long_run),
        pytest.param("fully_async", marks=[pytest.mark.smoke, pytest.mark.both_hosts]),
    ],
)
def test_a_policy_keeps_its_bound_and_loses_nothing(policy: str, tmp_path: Path) -> None:
    with LiveRun(f"{policy}.yaml", tmp_path, (*SMALL, "observability.report=true")) as run:
        summary = run.finish()
        steps = read_steps(run.folder)
        lanes = read_activity(run.folder)
    assert_nothing_lost(summary)
    assert summary.max_staleness <= BOUNDS[policy]
    assert [step.version for step in steps] == list(range(1, 7))
    assert all(len(step.staleness_counts) <= BOUNDS[policy] + 1 for step in steps)
    assert {"engine/0", "learner"} <= lanes.keys()
    for lane in lanes.values():  # every moment has a name: the spans tile the time
        assert all(abs(after.start_s - before.end_s) < 1e-6 for before, after in pairwise(lane))
    if policy == "sync":
        assert summary.max_logprob_abs_diff is not None
        assert summary.max_logprob_abs_diff <= 1e-4
    assert (run.folder / "report.html").stat().st_size > 10_000


ACTORS = ("engine/1", "scorer", "filter", "weight_publisher", "prompt_source")


@pytest.mark.slow  # `make chaos` kills each of these several times
@pytest.mark.parametrize("victim", ACTORS)
def test_a_run_survives_the_death_of(victim: str, tmp_path: Path) -> None:
    with LiveRun("fully_async.yaml", tmp_path, (*SMALL, "run.num_steps=12", "engines.count=2")) as run:
        run.await_steps(3)
        os.kill(run.pid_of(victim), signal.SIGKILL)
        summary = run.finish()
        output = run.output
    assert_nothing_lost(summary)
    assert summary.max_staleness <= 2
    assert [restart.name for restart in summary.restarts] == [victim]
    assert victim in output, "the terminal tells what happened"
    if victim.startswith("engine"):
        assert summary.tokens_lost_estimate >= 0
        assert "lost" in output


@pytest.mark.slow  # the random trials draw each of them by the thousand
@pytest.mark.parametrize(
    "on_stale",
    [OnStale.DROP, OnStale.REQUEUE, OnStale.MASK],
)
def test_what_does_not_wait_balances_too(on_stale: OnStale, tmp_path: Path) -> None:
    overrides = (*SMALL, f"staleness.on_stale={on_stale.value}", "staleness.target_outstanding=24")
    with LiveRun("fully_async.yaml", tmp_path, overrides) as run:
        summary = run.finish()
    balance = summary.balance
    assert balance.in_system == 0
    assert balance.issued == sum(count.num_samples for count in balance.ended)
    assert summary.max_staleness <= 2
