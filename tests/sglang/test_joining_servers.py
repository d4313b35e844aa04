"""Servers that join a run which goes on, and leave it: those that it starts itself, and those that run already."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from running_server import run_server
from test_sglang_runs import RUN_S, SMALL, await_samples, engines_of, groups_trained, processes_of
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun

from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.served.sglang.opening import ADMIN_KEY_VARIABLE
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.both_hosts, pytest.mark.timeout(580)]

ENDS_S = 30.0
"""Within which the server of a leaver ends; one that waited for a successor would take a minute."""
NUM_STEPS = 4
"""That whoever is left trains alone."""


def penstock(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, f"{words}: {done.output} {done.exception}"
    return done.stdout


def leaves(run: LiveRun, name: str) -> None:
    """This one goes, and others train on."""
    penstock("scale", str(run.folder), name)
    while f"{name} has left, with nothing left to do" not in run.output:
        run.await_steps(len(read_steps(run.folder)) + 1)
    run.await_steps(len(read_steps(run.folder)) + NUM_STEPS)


def test_a_server_is_started_for_a_newcomer_and_ends_with_a_leaver(
    environment: SglangEnvironment, tmp_path: Path
) -> None:
    assert environment.is_cpu
    options = (*SMALL, "engines.count=1", "engines.max=2")
    with LiveRun("sglang_cpu.yaml", tmp_path, options, timeout_s=RUN_S) as run:
        run.await_steps(1)
        await_samples(run, "engine/0")
        assert "the engines are engine/0, engine/1" in penstock("scale", str(run.folder), "engines=+1")
        await_samples(run, "engine/1")
        penstock("scale", str(run.folder), "engine/0")
        while "engine/0 has left, with nothing left to do" not in run.output:
            run.await_steps(len(read_steps(run.folder)) + 1)
        deadline_s = time.monotonic() + ENDS_S
        while processes_of(run, "engine/0", "sglang"):
            assert time.monotonic() < deadline_s, "its server waits for a successor"
            time.sleep(0.1)  # between two looks at the kernel's tables
        run.await_steps(len(read_steps(run.folder)) + NUM_STEPS)
        summary, folder = run.interrupt(), run.folder
    assert summary.restarts == (), "who leaves is not replaced, and no loss"
    assert engines_of(groups_trained(folder)[-8:]) == {"engine/1"}
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.slow
def test_a_server_that_runs_already_joins_by_its_address(
    environment: SglangEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    make_model("xs", model, 3)
    logs = [tmp_path / "first", tmp_path / "second"]
    for folder in logs:
        folder.mkdir()
    key = "ofboth"
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, key)
    with (
        run_server(environment, model, logs[0], admin_api_key=key) as first,
        run_server(environment, model, logs[1], admin_api_key=key) as second,
    ):
        options = (
            *SMALL,
            "model.make=null",
            f"model.path={model}",
            "engines.count=1",
            "engines.max=2",
            "engines.sglang={}",
            "weights.transport=disk",
            f"engines.addresses=[{first.address}]",
        )
        with LiveRun("sglang_cpu.yaml", tmp_path, options, timeout_s=RUN_S) as run:
            run.await_steps(1)
            await_samples(run, "engine/0")
            assert "the engines are engine/0, engine/1" in penstock("engine", "join", str(run.folder), second.address)
            await_samples(run, "engine/1")
            with pytest.raises(UserFault, match="is engine/1 of this run already"):
                CliRunner().invoke(app, ["engine", "join", str(run.folder), second.address], catch_exceptions=False)
            leaves(run, "engine/0")
            summary, folder = run.interrupt(), run.folder
    assert summary.restarts == ()
    assert engines_of(groups_trained(folder)[-8:]) == {"engine/1"}
    assert audit_ledger(folder / LEDGER_FILE).is_clean
