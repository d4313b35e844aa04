"""Whole runs whose learner publishes adapters alone: engines compute what it computes, and one that is replaced gets
the model beneath them again."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import LINES_ALONE

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

SHORT = (
    *LINES_ALONE, "learner.lora.publish=adapter", "learner.lora.rank=4", "learner.learning_rate=0.01",
    "engines.count=2", "run.num_steps=6", "learner.warm_start.num_steps=20", "learner.save_every=2",
)  # fmt: skip
FRESH = "train/fresh_logprob_abs_diff"


def fresh(run: LiveRun) -> list[float]:
    """By step: how far engines' log-probs of tokens that the newest version made are from the learner's."""
    return [value for step in read_steps(run.folder) if (value := step.metrics.get(FRESH)) is not None]


def test_engines_compute_what_the_learner_computes(tmp_path: Path) -> None:
    """Every version, after a warm start: the base is not the model of the scenario."""
    with LiveRun("sync.yaml", tmp_path, SHORT) as run:
        summary = run.finish()
        differences = fresh(run)
        report = audit_ledger(run.folder / LEDGER_FILE)
    assert summary.version == 6
    assert not summary.warnings
    assert len(differences) == 6
    assert max(differences) < 1e-5
    assert report.is_clean


def test_who_is_replaced_goes_on_with_base_and_adapters(tmp_path: Path) -> None:
    with LiveRun("quickstart.yaml", tmp_path, (*SHORT, "run.num_steps=12")) as run:
        for step, victim in ((3, "engine/0"), (7, "learner")):
            run.await_steps(step)
            os.kill(run.pid_of(victim), signal.SIGKILL)
        summary = run.finish()
        differences = fresh(run)
        report = audit_ledger(run.folder / LEDGER_FILE)
    assert summary.version == 12
    assert {restart.name for restart in summary.restarts} == {"engine/0", "learner"}
    assert max(differences) < 1e-5
    assert report.is_clean
