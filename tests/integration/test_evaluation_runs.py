"""Evaluation in whole runs on Ray and ZMQ: beside training, with a dead engine, over a stop, and alone."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from live_run import SCENARIOS, LiveRun
from short_runs import SMALL_BATCHES

from penstock.backends.ledger.audit import audit_ledger
from penstock.runtime.observability.evaluations import read_evaluations

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.ledger.audit import AuditReport

pytestmark = pytest.mark.timeout(540)

DATASETS = """
  datasets:
    - name: sampled
      path: lines:200@[:12]
      samples_per_prompt: 4
    - name: greedy
      path: lines:64@[-8:]
      sampling: {temperature: 0, max_response_tokens: 32}
"""
EVERY_2 = f"""
evaluation:
  every: 2
  before_first: true
  at_end: true
{DATASETS}"""
SMALL = (*SMALL_BATCHES, "learner.warm_start.num_steps=60")
SAMPLES_OF_ONE = 12 * 4 + 8


def scenario(folder: Path, policy: str, block: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text((SCENARIOS / f"{policy}.yaml").read_text() + block)
    return path


def clean_audit(folder: Path) -> AuditReport:
    report = audit_ledger(folder / "ledger.sqlite")
    assert report.is_clean, report.findings
    assert report.balance.is_balanced
    assert not report.is_evaluating
    assert report.balance.in_system == 0
    return report


def num_samples(report: AuditReport, state: str) -> int:
    return sum(count.num_samples for count in report.balance.ended if count.state == state)


@pytest.mark.slow  # the example of several datasets evaluates, and simulated runs lose engines while they do
def test_a_run_evaluates_every_two_steps_while_an_engine_dies(tmp_path: Path) -> None:
    overrides = (*SMALL, "run.num_steps=8", "engines.count=2")
    with LiveRun(scenario(tmp_path, "fully_async", EVERY_2), tmp_path, overrides) as run:
        run.await_steps(3)
        os.kill(run.pid_of("engine/1"), signal.SIGKILL)
        summary = run.finish()
        folder = run.folder
    assert summary.completed
    assert summary.max_staleness <= 2
    report = clean_audit(folder)
    assert report.version == 8
    assert (report.evaluated_versions[0], report.evaluated_versions[-1]) == (0, 8)
    assert set(report.evaluated_versions) <= {0, 2, 4, 6, 8}
    assert num_samples(report, "trained") == 8 * 8 * 8
    num_evaluated = num_samples(report, "evaluated") + num_samples(report, "failed")
    assert num_evaluated == SAMPLES_OF_ONE * len(report.evaluated_versions)
    rows = read_evaluations(folder)
    assert tuple(row.version for row in rows) == report.evaluated_versions
    for row in rows:
        assert row.metrics["eval/sampled/num_prompts"] == 12
        assert row.metrics["eval/greedy/num_prompts"] == 8
        assert row.metrics["eval/greedy/response_len/max"] <= 32
        assert row.metrics["eval/sampled/version/oldest"] >= row.version


@pytest.mark.slow
def test_a_pinned_evaluation_is_of_one_version_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    block = EVERY_2.replace("  every: 2\n", "  every: 2\n  pinned: true\n").replace("4\n", "64\n")
    overrides = (*SMALL, "run.num_steps=4", "evaluation.max_running=2")
    with LiveRun(scenario(tmp_path, "one_step_off", block), tmp_path, overrides) as run:
        run.await_steps(2)
        run.process.kill()  # the driver, and with it everything: somewhere in the evaluation of version 2
        run.process.wait(20)
        folder = run.folder
    with LiveRun.resumed(folder) as run:
        assert run.finish().completed
    report = clean_audit(folder)
    assert report.evaluated_versions == (0, 2, 4)
    for row in read_evaluations(folder):
        assert row.is_pinned
        for name in ("sampled", "greedy"):
            found = {row.metrics[f"eval/{name}/version/{end}"] for end in ("oldest", "newest")}
            assert found == {row.version}


@pytest.mark.slow
def test_a_run_that_only_evaluates_trains_nothing(tmp_path: Path) -> None:
    block = f"\nevaluation:{DATASETS}"
    with LiveRun(scenario(tmp_path, "sync", block), tmp_path, (*SMALL, "run.only=evaluate")) as run:
        summary = run.finish()
        folder = run.folder
    assert summary.completed
    report = clean_audit(folder)
    assert (report.version, report.evaluated_versions) == (0, (0,))
    assert report.balance.issued == num_samples(report, "evaluated") == SAMPLES_OF_ONE
