"""A server on the learner's device: it is lent it while the learner waits, or takes turns with it for every batch.

On a CPU the server answers the calls to release and to resume memory, and frees nothing: shown are the turns, the order
of the calls, and that what it makes after it has slept is trained.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_sglang_runs import RUN_S, SMALL, await_samples, processes_of
from test_sleep import CALLS

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun
from typer.testing import CliRunner

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.training import Activity
from penstock.runtime.cli.app import app
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

# Two servers and a learner for minutes. Which calls a server gets, and what it computes after it has slept, is in
# test_sleep.py; whose turn it is in tests/integration/test_elastic_run.py and tests/simulation/test_lending.py.
pytestmark = [pytest.mark.sglang, pytest.mark.both_hosts, pytest.mark.slow, pytest.mark.timeout(580)]

NUM_TURNS = 3
ON_CPU = (
    *SMALL,
    "engines.count=1",
    "engines.start_timeout_s=300",
    "engines.slots=8",  # so that the learner waits for most of a step
    "engines.sglang.uvicorn_access_log_exclude_prefixes=[/ready]",
    "learner.device=cpu",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
    "reward.function=random",
    "sampling.max_response_tokens=32",
)


def calls_of(folder: Path, engine: str) -> list[str]:
    """The control calls that the servers of an engine have answered so far, in order."""
    logs = sorted((folder / "logs").glob(f"{engine.replace('/', '-')}*sglang.log"))
    text = "".join(path.read_text() for path in logs)
    return CALLS.findall(text)


def check_turns(calls: list[str]) -> None:
    """Asleep it is told nothing before the swap that wakes it: weights are loaded between its two parts of memory."""
    slept = [index for index, call in enumerate(calls) if call == "release_memory_occupation"]
    assert len(slept) >= NUM_TURNS
    for index in slept:
        assert calls[index - 1] == "flush_cache"
        woken = calls[index + 1 :][:5]
        expected = ["pause_generation", "resume_memory_occupation", "update_weights_from_disk", "weights_checker",
                    "resume_memory_occupation"]  # fmt: skip
        assert woken == expected[: len(woken)]


def has_slept(folder: Path, name: str) -> bool:
    return any(span.activity is Activity.ASLEEP for span in read_activity(folder)[name])


def trained_by(folder: Path) -> set[str]:
    """The engines of whose samples some were trained."""
    with contextlib.closing(sqlite3.connect(folder / LEDGER_FILE)) as ledger:
        return {engine for (engine,) in ledger.execute("SELECT DISTINCT engine FROM samples WHERE state = 'trained'")}


def test_a_server_that_is_lent_the_learners_device_generates_while_that_waits(
    environment: SglangEnvironment, tmp_path: Path
) -> None:
    """It is started once, in a turn of its own; a batch puts it to sleep, with what it has going on elsewhere."""
    assert environment.is_cpu
    options = (*ON_CPU, "engines.max=2", "engines.lent=1", "engines.lend_after_s=0.05")
    with LiveRun("sglang_cpu.yaml", tmp_path, options, timeout_s=RUN_S) as run:
        run.await_steps(1)
        done = CliRunner().invoke(app, ["scale", str(run.folder), "engines=+1"])
        assert done.exit_code == 0, done.output
        await_samples(run, "engine/1")
        servers = set(processes_of(run, "engine/1", "sglang::"))
        while calls_of(run.folder, "engine/1").count("release_memory_occupation") < NUM_TURNS:
            run.await_steps(len(read_steps(run.folder)) + 1)
        assert set(processes_of(run, "engine/1", "sglang::")) == servers, "it sleeps, and is not started again"
        summary, folder = run.interrupt(), run.folder
    assert summary.restarts == ()
    check_turns(calls_of(folder, "engine/1"))
    assert has_slept(folder, "learner")
    assert "release_memory_occupation" not in calls_of(folder, "engine/0")
    assert trained_by(folder) == {"engine/0", "engine/1"}
    assert audit_ledger(folder / LEDGER_FILE).is_clean
    assert not processes_of(run, "engine/1", "sglang"), "a server that sleeps ends with its run"


def test_a_colocated_server_takes_turns_with_the_learner(environment: SglangEnvironment, tmp_path: Path) -> None:
    assert environment.is_cpu
    options = (
        *ON_CPU,
        "run.num_steps=5",
        "engines.placement=colocate",
        "staleness.policy=sync",
        "staleness.max_staleness=0",
    )
    with LiveRun("sglang_cpu.yaml", tmp_path, options, timeout_s=RUN_S) as run:
        summary, folder = run.finish(), run.folder
    assert summary.completed
    assert summary.restarts == ()
    check_turns(calls_of(folder, "engine/0"))
    assert has_slept(folder, "learner")
    assert audit_ledger(folder / LEDGER_FILE).is_clean
