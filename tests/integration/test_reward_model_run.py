"""A policy learns what a reward model with planted weights likes, and a reward model that dies costs no sample."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from live_run import LiveRun

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from planted_reward_model import plant_reward_model

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_activity, read_steps

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]
NUM_STEPS = 7
LIKED = "rollout/reward/liked"
SCENARIO = {
    "run": {"name": "liked", "num_steps": NUM_STEPS},
    "model": {"make": "xs", "max_context": 256},
    "data": {"path": "lines:100"},
    "sampling": {"samples_per_group": 4, "max_response_tokens": 16},
    "reward": {
        "components": [
            {"name": "liked", "function": "reward_model"},
            {"name": "length", "function": "length_penalty", "weight": 0.1},
        ]
    },
    "reward_model": {"device": "cpu"},
    "filter": {"drop_zero_spread": False},
    "staleness": {"policy": "sync"},
    "engines": {"slots": 32, "device": "cpu"},
    "learner": {
        "groups_per_batch": 8, "learning_rate": 3e-2, "warmup_steps": 0, "lr_schedule": "constant", "device": "cpu",
    },
    "runtime": {"host": "local", "heartbeat_timeout_s": 60},
}  # fmt: skip


def test_a_policy_learns_what_its_reward_model_likes(tmp_path: Path) -> None:
    plant_reward_model(tmp_path / "liking", "e")
    path = tmp_path / "liked.yaml"
    (tmp_path / "runs").mkdir()
    path.write_text(yaml.safe_dump(SCENARIO))
    with LiveRun(path, tmp_path / "runs", (f"reward_model.path={tmp_path / 'liking'}",)) as run:
        run.await_steps(1)
        os.kill(run.pid_of("reward_model/0"), signal.SIGKILL)
        summary = run.finish()
        liked = [step.metrics[LIKED] or 0.0 for step in read_steps(run.folder)]
        lanes = read_activity(run.folder)
        findings = audit_ledger(run.folder / LEDGER_FILE).findings
    assert len(liked) == NUM_STEPS
    assert liked[-1] > 2 * liked[0] > 0, liked
    assert [restart.name for restart in summary.restarts] == ["reward_model/0"]
    assert {count.state for count in summary.balance.ended} == {"trained"}
    assert summary.balance.issued == NUM_STEPS * 8 * 4
    assert {row.activity for row in lanes["reward_model/0"]} >= {"starting", "working", "waiting_for_samples"}
    assert findings == ()
