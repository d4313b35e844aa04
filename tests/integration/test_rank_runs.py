"""Runs on Ray in which the learner is several processes: what they train, and what becomes of a rank that dies."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import SMALL_BATCHES

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.processes.process_facts import environment_of, is_running, start_ticks_of
from penstock.messages.names import LEARNER
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.observability.summary import RunSummary

pytestmark = pytest.mark.timeout(300)

RANKS = (
    *SMALL_BATCHES, "learner.num_ranks=2", "model.make=xs", "run.num_steps=8", "learner.warm_start.num_steps=20",
    "learner.save_every=3",
)  # fmt: skip
_READY = re.compile(r"rank (\d+) \(process (\d+)(?: on [^)]+)?\) is ready")


def ranks_of(run: LiveRun, epoch: int = 1) -> dict[int, int]:
    """Pid by rank."""
    log = (run.folder / "logs" / f"{LEARNER}-{epoch}.log").read_text()
    return {int(rank): int(pid) for rank, pid in _READY.findall(log)}


def assert_recovered(run: LiveRun, summary: RunSummary) -> None:
    """It is complete, every sample is accounted for, and the learner was started twice."""
    assert summary.completed
    assert summary.version == 8
    assert summary.balance.in_system == 0
    assert [(restart.name, restart.count) for restart in summary.restarts] == [(LEARNER, 1)]
    assert [step.version for step in read_steps(run.folder)] == list(range(1, 9))
    assert audit_ledger(run.folder / LEDGER_FILE).findings == ()
    assert ranks_of(run, epoch=2).keys() == {0, 1}


def is_alive(pid: int) -> bool:
    try:
        return is_running(pid, start_ticks_of(pid)) and any(
            variable.startswith(b"PENSTOCK_LEARNER_RANK=") for variable in environment_of(pid)
        )
    except ProcessLookupError:
        return False


@pytest.mark.slow  # a rank of another node dies in test_learner_nodes.py
def test_a_run_survives_the_death_of_a_rank(tmp_path: Path) -> None:
    with LiveRun("fully_async.yaml", tmp_path, RANKS) as run:
        run.await_steps(4)
        ranks = ranks_of(run)
        assert ranks.keys() == {0, 1}
        os.kill(ranks[1], signal.SIGKILL)
        summary = run.finish()
        log = (run.folder / "logs" / "driver.log").read_text()
    assert_recovered(run, summary)
    assert f"rank 1 (process {ranks[1]}) was killed by SIGKILL" in log
    assert "learner-rank1-1.log" in log
    assert not [pid for pid in (*ranks.values(), *ranks_of(run, epoch=2).values()) if is_alive(pid)]


@pytest.mark.slow
def test_a_run_survives_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with LiveRun("fully_async.yaml", tmp_path, (*RANKS, "learner.rank_timeout_s=20")) as run:
        run.await_steps(4)
        ranks = ranks_of(run)
        os.kill(ranks[1], signal.SIGSTOP)
        summary = run.finish()
        log = (run.folder / "logs" / "driver.log").read_text()
    assert_recovered(run, summary)
    assert f"rank 1 (process {ranks[1]}) is stopped by a signal" in log
    assert not [pid for pid in ranks.values() if is_alive(pid)]


@pytest.mark.slow
def test_no_rank_outlives_the_learners_process(tmp_path: Path) -> None:
    with LiveRun("fully_async.yaml", tmp_path, RANKS) as run:
        run.await_steps(4)
        ranks = ranks_of(run)
        os.kill(run.pid_of(LEARNER), signal.SIGKILL)
        summary = run.finish()
    assert_recovered(run, summary)
    assert not [pid for pid in ranks.values() if is_alive(pid)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    """The batches that one rank has trained, trained by two: sampling is out of it, where rounding would tip a token
    sooner or later and give both other batches from there on."""
    overrides = (*RANKS, "learner.warm_start.num_steps=100", "learner.learning_rate=1e-3")
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
    with LiveRun("sync.yaml", tmp_path / "one", (*overrides, "learner.num_ranks=1", "--keep-samples")) as run:
        assert run.finish().completed
        one, recorded = read_steps(run.folder), run.folder
    with LiveRun("sync.yaml", tmp_path / "two", (*overrides, "--only", "learner", "--from", str(recorded))) as run:
        assert run.finish().completed
        two = read_steps(run.folder)
        assert ranks_of(run).keys() == {0, 1}
    assert [step.version for step in two] == list(range(1, 9))
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-3), ("rollout/raw_reward", 1e-9)):
        before, after = ([step.metrics[name] for step in steps] for steps in (one, two))
        assert any(before)
        assert after == pytest.approx(before, rel=tolerance, abs=tolerance), name
