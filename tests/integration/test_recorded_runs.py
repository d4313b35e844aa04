"""Runs on responses that rows hold: imitation, pairs, both kinds of samples side by side; and rejection sampling."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import PATIENT

from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

SMALL = ("model.make=xs", "learner.groups_per_batch=8", PATIENT)


def run(scenario: str, tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    """The figures of each step of a run that loses nothing and whose audit is clean."""
    with LiveRun(scenario, tmp_path, (*SMALL, *overrides)) as live:
        summary = live.finish()
        steps = read_steps(live.folder)
        audit = subprocess.run(
            [sys.executable, "-m", "penstock.runtime.cli", "audit", str(live.folder)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert summary.completed
    assert summary.balance.in_system == 0
    assert audit.returncode == 0, audit.stdout
    return [{name: value for name, value in step.metrics.items() if value is not None} for step in steps]


@pytest.mark.slow  # the examples have a shorter one
def test_a_run_of_demonstrations_learns_them_and_publishes_no_weights(tmp_path: Path) -> None:
    steps = run("sft.yaml", tmp_path, "run.num_steps=12", "data.path=lines:500", "learner.warmup_steps=2")
    losses = [step["train/sft_loss"] for step in steps]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert not [step for step in steps if "rollout/raw_reward" in step]


@pytest.mark.slow
def test_a_run_of_pairs_prefers_the_better_responses_more_and_more(tmp_path: Path) -> None:
    steps = run(
        "dpo.yaml", tmp_path, "run.num_steps=12", "learner.warm_start.num_steps=60", "learner.learning_rate=1e-3"
    )
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)  # nothing is preferred yet: log 2
    assert steps[-1]["train/loss"] < 0.6
    assert steps[-1]["train/dpo_accuracy"] > 0.6


@pytest.mark.slow
def test_a_run_of_rejection_sampling_imitates_the_best(tmp_path: Path) -> None:
    steps = run("rejection_sampling.yaml", tmp_path, "run.num_steps=8", "learner.warm_start.num_steps=150")
    assert all(0.0 <= step["train/imitated_ratio"] < 1.0 for step in steps)
    assert any(step["train/imitated_ratio"] > 0.0 for step in steps)


@pytest.mark.slow
def test_demonstrations_and_samples_of_the_model_share_the_steps_of_a_run(tmp_path: Path) -> None:
    steps = run(
        "quickstart.yaml",
        tmp_path,
        "run.num_steps=8",
        "learner.warm_start.num_steps=60",
        "data.path=lines:200",
        "data.recorded.path=lines:1600",
        "data.recorded.response_key=label",
        "data.recorded.loss=sft",
        'engines.more=[{"backend": "recorded"}]',
    )
    assert any("train/sft_loss" in step and "train/pg_loss" in step for step in steps)
