"""A whole run with ``sampling.replay_kept``: engine and learner agree over what cut-offs left, and the samples say what
that was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from live_run import LiveRun
from short_runs import FEW_LINES

from penstock.backends.ledger.archived_groups import read_archived
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

SHORT = (
    *FEW_LINES, "run.num_steps=2", "run.keep_samples=true", "model.max_context=64", "sampling.top_p=0.8",
    "sampling.replay_kept=16", "staleness.max_staleness=0", "learner.warm_start=null",
)  # fmt: skip


def test_engine_and_learner_agree_over_the_tokens_that_were_kept(tmp_path: Path) -> None:
    with LiveRun("quickstart.yaml", tmp_path, list(SHORT)) as run:
        run.finish()
        steps = [step.metrics for step in read_steps(run.folder)]
    for step in steps:
        assert (step["train/train_rollout_logprob_abs_diff"] or 0) < 1e-5
        assert 1 < (step["rollout/top_p_kept_vocab_per_token"] or 0) <= 16
    groups = [group for file in sorted((run.folder / "samples").glob("*.parquet")) for group in read_archived(file)]
    parts = [part for group in groups for sample in group.samples for part in sample.parts]
    assert len(parts) == 2 * 4 * 4
    for part in parts:
        assert part.kept is not None
        counts = np.frombuffer(part.kept.counts, dtype="<u2")
        logprobs = np.frombuffer(part.logprobs, dtype="<f4")
        assert (counts > 0).all()
        assert (logprobs[counts == 1] == 0).all(), "over one token"
