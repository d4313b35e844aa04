"""A student learns from a teacher on Ray and ZMQ: its distance falls, and a dead teacher costs no sample."""

from __future__ import annotations

import math
import os
import signal
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

SMALL = (
    "run.num_steps=6",
    "staleness={policy: sync}",  # so no batch is ready without the teacher that is killed
    "sampling.max_response_tokens=64",
    "learner.groups_per_batch=16",
    "learner.learning_rate=1e-3",
    "learner.warmup_steps=0",
    "learner.lr_schedule=constant",
    "learner.warm_start.num_steps=30",
    "teacher.model.make=xs",
    "teacher.model.warm_start.num_steps=80",
    "runtime.heartbeat_timeout_s=60",  # a test machine may be busy with other things
)
REVERSE_KL = "train/opd_reverse_kl"


@pytest.mark.slow  # the example of distillation is run in any case
def test_a_student_comes_nearer_to_its_teacher_and_a_dead_teacher_costs_no_sample(tmp_path: Path) -> None:
    with LiveRun("distill.yaml", tmp_path, SMALL) as run:
        run.await_steps(2)
        os.kill(run.pid_of("teacher/0"), signal.SIGKILL)
        summary = run.finish()
        steps = read_steps(run.folder)
        lanes = read_activity(run.folder)
    assert [restart.name for restart in summary.restarts] == ["teacher/0"]
    distances = [step.metrics[REVERSE_KL] or math.inf for step in steps]
    assert len(distances) == 6
    assert max(distances[-2:]) < distances[0], distances
    balance = summary.balance
    assert balance.in_system == 0
    assert {count.state for count in balance.ended} == {"trained"}
    assert balance.issued == sum(count.num_samples for count in balance.ended) == 6 * 16 * 4
    assert "teacher/0" in lanes
    assert audit_ledger(run.folder / LEDGER_FILE).findings == ()
