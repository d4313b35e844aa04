"""What happens to the machine: a full disk, a lost node, everything gone at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from chaos_run import HERE, TIMEOUT_S, ChaosRun, assert_replays
from host_harness import HOST

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.chaos.verdict import CHAOS_FILE, Verdict

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SLOW_ENGINES = ("engines.simulated.token_s=0.02", "sampling.max_response_tokens=64")
"""A step takes as long as they need for its samples, whatever else the machine does."""


def has_namespaces() -> bool:
    """Whether this user may have a mount namespace of his own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    commands = ([unshare, "--mount", "true"], [unshare, "--mount", "--map-root-user", "true"])
    return any(subprocess.run(command, capture_output=True, timeout=10).returncode == 0 for command in commands)


@pytest.mark.skipif(not has_namespaces(), reason="a disk that can be filled needs a mount namespace (unshare --mount)")
def test_a_full_disk_stops_the_run_with_the_reason_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.runtime.cli", "chaos", str(HERE / "modelled.yaml")]
    done = subprocess.run(
        [
            *command,
            f"run.folder={tmp_path}",
            f"runtime.host={HOST}",
            "observability.record=true",
            "run.num_steps=20",
            "--faults",
            "disk_full@0.5",
            "--timeout",
            "240",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    (kept,) = tmp_path.glob(f"*/*/{CHAOS_FILE}")
    (output,) = tmp_path.glob("*/output.txt")
    told = output.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + told
    verdict = msgspec.json.decode(kept.read_bytes(), type=Verdict)
    assert verdict.is_clean
    assert verdict.version == 20
    assert [code == 0 for code in verdict.exit_codes] == [False, True]
    assert "disk is full" in told
    assert audit_ledger(kept.parent / LEDGER_FILE).is_clean
    assert_replays(kept.parent)


def test_the_machine_goes_down_and_the_run_goes_on_after_it(tmp_path: Path) -> None:
    run = ChaosRun(tmp_path, "modelled.yaml", ("machine", "kill:engine/0"), seed=21, overrides=("run.num_steps=20",))
    run.assert_clean()
    assert len(run.verdict.exit_codes) == 2


def test_a_node_that_goes_away_with_all_its_processes_costs_no_sample(tmp_path: Path) -> None:
    run = ChaosRun(
        tmp_path,
        "modelled.yaml",
        ("node_loss@0.3", "kill:scorer@0.6", "duplicate:scorer>filter@0.5+2=0.5"),
        seed=22,
        overrides=("run.num_steps=30", "runtime.host=ray", *SLOW_ENGINES),
    )
    run.assert_clean()
    [lost, *_] = run.verdict.faults
    assert lost.restored_after_s is not None, "the speed of before was not regained"
    assert set(run.verdict.restarts) - {"scorer"}, "somebody was on the node"
    assert all(name in ("learner", "scorer") or name.startswith("engine/") for name in run.verdict.restarts)
    assert run.verdict.hits
