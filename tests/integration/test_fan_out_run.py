"""Whole runs whose engines pass weights on to each other: a source that is killed or stopped costs no version and no
sample."""

from __future__ import annotations

import os
import re
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
    *LINES_ALONE,
    "weights.transport=network",
    "engines.count=3",
    "run.num_steps=12",
    "learner.warm_start.num_steps=20",
    "runtime.heartbeat_timeout_s=10",
    "runtime.heartbeat_s=0.1",  # what engines count is reported that often, and a step takes a tenth
)
CAME = re.compile(r"version \d+: (\d+) bytes came from the learner and (\d+) from other engines")


@pytest.mark.parametrize("word", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_goes_on_when_a_source_is_killed_or_stopped(word: signal.Signals, tmp_path: Path) -> None:
    with LiveRun("quickstart.yaml", tmp_path, SHORT) as run:
        run.await_steps(4)
        os.kill(run.pid_of("engine/0"), word)  # the model is one piece, which the first of the sources gets
        summary = run.finish()
        logs = [path.read_text() for path in (run.folder / "logs").glob("engine-*.log")]
        report = audit_ledger(run.folder / LEDGER_FILE)
        passed_on = [step.metrics["engine/weights_passed_on_bytes"] or 0.0 for step in read_steps(run.folder)]
    assert summary.version == 12
    assert report.is_clean
    came = [(int(found[1]), int(found[2])) for text in logs for found in CAME.finditer(text)]
    assert sum(from_engines > 0 for _, from_engines in came) >= 3
    assert passed_on == sorted(passed_on)
    assert passed_on[-1] > 0
