"""The calculator's example as it stands: it learns, an engine dies on the way, and no episode is lost."""

# pyarrow is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, cast

import pyarrow.parquet as pq
import pytest
from live_run import LiveRun

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

LEAST_RISE = 0.4
WINDOW = 10
OVERRIDES = ("engines.count=2", "run.keep_samples=true", "runtime.heartbeat_timeout_s=60")


@pytest.mark.slow  # minutes of training; the example search uses its tool in make runs
@pytest.mark.timeout(600)
def test_the_calculator_is_learnt_and_an_engine_that_is_killed_costs_no_episode(tmp_path: Path) -> None:
    with LiveRun("calculator.yaml", tmp_path, OVERRIDES, timeout_s=500) as live:
        live.await_steps(20)
        os.kill(live.pid_of("engine/0"), signal.SIGKILL)
        summary = live.finish()
        folder = live.folder
    assert summary.completed
    assert summary.balance.in_system == 0
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    steps = read_steps(folder)
    assert len(steps) == steps[-1].version
    rewards = [reward for step in steps if (reward := step.metrics.get("rollout/raw_reward")) is not None]
    assert sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW >= LEAST_RISE
    _check_masks(folder)


def _check_masks(folder: Path) -> None:
    """Every masked token is the calculator's: a result between ``=`` and ``;``, after a call."""
    tokenizer = TextTokenizer(folder / "model")
    num_asked = 0
    for file in sorted((folder / "samples").rglob("*.parquet")):
        rows = cast("list[dict[str, Any]]", pq.read_table(file, columns=["response_tokens", "loss_mask"]).to_pylist())
        for row in rows:
            ids: list[int] = row["response_tokens"]
            mask: list[int] = row["loss_mask"] or [1] * len(ids)
            masked = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m])
            calls = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).count(")")
            assert masked.count("=") == masked.count(";")
            assert masked.count("=") in (calls, calls - 1)  # a limit of turns may leave the last call without a result
            assert not masked.strip("=;?0123456789.-e+"), masked
            num_asked += bool(masked)
    assert num_asked
