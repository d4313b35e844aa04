"""Runs on Ray in which the learner is where the engines are: they take turns, and a loss on either side leads on."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import SMALL_BATCHES

from penstock.messages.training import Activity
from penstock.runtime.observability.trackers import read_activity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.trackers import ActivityRow

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

COLOCATED = (
    *SMALL_BATCHES, "engines.placement=colocate", "run.num_steps=8", "learner.warm_start.num_steps=40",
    "learner.save_every=3",
)  # fmt: skip


def seconds(lane: Sequence[ActivityRow], *activities: Activity) -> float:
    return sum(span.end_s - span.start_s for span in lane if span.activity in activities)


def overlap_s(one: Sequence[ActivityRow], other: Sequence[ActivityRow]) -> float:
    """Time in which both work."""
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in one
        if a.activity is Activity.WORKING
        for b in other
        if b.activity is Activity.WORKING
    )


def test_learner_and_engine_take_turns(tmp_path: Path) -> None:
    with LiveRun("sync.yaml", tmp_path, COLOCATED) as run:
        summary = run.finish()
        lanes = read_activity(run.folder)
    assert summary.completed
    assert summary.version == 8
    assert summary.max_staleness == 0
    learner, engine = lanes["learner"], lanes["engine/0"]
    for lane in (learner, engine):
        assert all(abs(after.start_s - before.end_s) < 1e-6 for before, after in pairwise(lane))
        assert seconds(lane, Activity.ASLEEP) > 0
        assert sum(span.activity is Activity.ASLEEP for span in lane) >= 7, "a turn for each batch"
    assert overlap_s(learner, engine) == 0


@pytest.mark.slow  # tests/simulation/test_colocation.py kills both in every state of their turns
@pytest.mark.parametrize("victim", ["engine/0", "learner"])
def test_a_colocated_run_survives_the_death_of(victim: str, tmp_path: Path) -> None:
    with LiveRun("sync.yaml", tmp_path, COLOCATED) as run:
        run.await_steps(3)
        os.kill(run.pid_of(victim), signal.SIGKILL)
        summary = run.finish()
    assert summary.completed
    assert summary.version == 8
    assert summary.balance.in_system == 0
    assert [restart.name for restart in summary.restarts] == [victim]
