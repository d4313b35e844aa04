"""A whole run whose episodes show images, through the death of an engine."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from live_run import LiveRun

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

SHORT = ("learner.groups_per_batch=2", "run.num_steps=4", "evaluation.datasets=[]", "evaluation.every=null")


@pytest.mark.long_run
@pytest.mark.timeout(300)
def test_what_is_trained_after_an_engine_died_has_its_images(tmp_path: Path) -> None:
    with LiveRun("examples/vlm_zoom.yaml", tmp_path, (*SHORT, "runtime.heartbeat_timeout_s=60")) as run:
        run.await_steps(1)
        os.kill(run.pid_of("engine/0"), signal.SIGKILL)
        summary = run.finish()
        folder = run.folder
    assert summary.completed
    assert summary.balance.in_system == 0
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    reader = cast("Any", pq)  # which is typed in part only
    rows = [row for file in (folder / "samples").rglob("*.parquet") for row in reader.read_table(file).to_pylist()]
    assert {row["version"] for row in rows} == {1, 2, 3, 4}
    for row in rows:
        (without_colours, closer) = row["part_media"][0]
        assert without_colours["at"] < 0 < closer["at"]
        assert not any(row["loss_mask"][closer["at"] : closer["at"] + closer["num_tokens"]])
        for each in (without_colours, closer):
            assert hashlib.sha256(Path(each["reference"]).read_bytes()).hexdigest() == each["digest"]
    first = next(iter(read_steps(folder))).metrics["train/train_rollout_logprob_abs_diff"]
    assert first is not None
    assert first < 1e-5, "engine and learner see the same"
