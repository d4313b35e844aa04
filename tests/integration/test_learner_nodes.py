"""A run on Ray whose learner lies over two nodes, both of them this machine: it trains, and survives a rank's death."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from host_two_nodes import two_nodes
from live_run import LiveRun
from short_runs import SMALL_BATCHES
from test_rank_runs import is_alive, ranks_of

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.names import LEARNER
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SETTINGS = (
    *SMALL_BATCHES,
    "learner.num_ranks=2",  # one GPU a node is declared, so one rank a node
    "engines.device=cpu",
    "model.make=xs",
    "run.num_steps=5",
    "learner.warm_start.num_steps=10",
    "learner.save_every=2",
)


def test_a_learner_over_two_nodes_survives_the_death_of_the_rank_on_the_other_one(tmp_path: Path) -> None:
    with (
        two_nodes(num_gpus=1) as address,
        LiveRun("fully_async.yaml", tmp_path, (*SETTINGS, "runtime.host=ray", f"runtime.ray_address={address}")) as run,
    ):
        run.await_steps(2)
        ranks = ranks_of(run)
        assert ranks.keys() == {0, 1}
        node_log = run.folder / "logs" / f"{LEARNER}-node1-1.log"
        assert "starts the ranks 1 to 1" in node_log.read_text()
        os.kill(ranks[1], signal.SIGKILL)
        summary = run.finish()
        log = (run.folder / "logs" / "driver.log").read_text()
        again = ranks_of(run, epoch=2)
        assert again.keys() == {0, 1}
        assert not [pid for pid in (*ranks.values(), *again.values()) if is_alive(pid)]
    assert summary.completed
    assert summary.balance.in_system == 0
    assert [(restart.name, restart.count) for restart in summary.restarts] == [(LEARNER, 1)]
    assert [step.version for step in read_steps(run.folder)] == list(range(1, 6))
    assert audit_ledger(run.folder / LEDGER_FILE).findings == ()
    assert f"rank 1 (process {ranks[1]} on " in log
    assert "was killed by SIGKILL" in log
    assert "learner-rank1-1.log" in log
