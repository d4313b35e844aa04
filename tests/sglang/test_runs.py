"""Whole runs on stock servers, one for each staleness policy, in which one server is killed and another is stopped."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun

from penstock.backends.engines.sglang.settings import OWNER_VARIABLE
from penstock.backends.processes import marked_processes, title_of
from penstock.backends.stores.audit import audit_ledger
from penstock.backends.stores.sqlite import SqliteReader
from penstock.backends.stores.tables import LEDGER_FILE
from penstock.messages.ledger import BatchLeased
from penstock.runtime.observability.trackers import read_run_events

if TYPE_CHECKING:
    from penstock.backends.engines.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.ray]

NUM_STEPS = 12
SMALL = (
    f"run.num_steps={NUM_STEPS}",
    "run.seed=3",
    "learner.groups_per_batch=8",
    "learner.warm_start.num_steps=120",
    "sampling.max_response_tokens=64",
    "runtime.heartbeat_timeout_s=30",
)


def processes_of(run: LiveRun, engine: str, title: str) -> list[int]:
    """The processes of an engine's server with this in their title."""
    marks = [f"{OWNER_VARIABLE}={engine}".encode(), f"PENSTOCK_RUN_FOLDER={run.folder}".encode()]
    return [pid for pid in marked_processes(marks) if title in title_of(pid)]


def versions_trained(folder: Path) -> set[int]:
    """Versions in the spans of everything that was trained."""
    ledger = SqliteReader(folder / LEDGER_FILE)
    try:
        leases = [entry for entry in ledger.entries() if isinstance(entry, BatchLeased)]
        assert [lease.version for lease in leases] == list(range(1, NUM_STEPS + 1))
        groups = [group for lease in leases for group in ledger.payloads(lease.group_ids)]
    finally:
        ledger.close()
    parts = [part for group in groups for sample in group.samples for part in sample.parts]
    return {span.version for part in parts for span in part.spans if span.num_tokens}


def versions_announced(folder: Path) -> set[int]:
    """As the Buffer heard of them."""
    rows = [row for row in read_run_events(folder) if row.actor == "buffer" and row.event == "VersionAnnounced"]
    return {int(row.summary.split()[1]) for row in rows}


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("policy", "max_staleness"), [("sync", 0), ("one_step_off", 1), ("fully_async", 2)])
def test_a_run_survives_the_loss_of_its_servers_under_every_policy(
    environment: SglangEnvironment, tmp_path: Path, policy: str, max_staleness: int
) -> None:
    assert environment.is_cpu
    overrides = (*SMALL, f"staleness.policy={policy}", f"staleness.max_staleness={max_staleness}")
    with LiveRun("sglang_cpu.yaml", tmp_path, overrides) as run:
        run.await_steps(2)
        (scheduler,) = processes_of(run, "engine/0", "scheduler")
        os.kill(scheduler, signal.SIGKILL)
        run.await_steps(4)
        (scheduler,) = processes_of(run, "engine/1", "scheduler")
        os.kill(scheduler, signal.SIGSTOP)
        summary = run.finish()
        folder = run.folder
    assert (summary.completed, summary.version) == (True, NUM_STEPS)
    assert {"engine/0", "engine/1"} <= {restarts.name for restarts in summary.restarts}
    assert audit_ledger(folder / LEDGER_FILE).is_clean
    trained = versions_trained(folder)
    assert trained <= versions_announced(folder)
    assert len(trained) > NUM_STEPS // 2
    assert not processes_of(run, "engine/0", "sglang") + processes_of(run, "engine/1", "sglang")
