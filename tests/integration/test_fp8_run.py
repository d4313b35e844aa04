"""A whole run whose engines get weights in FP8: their log-probs are off by what that rounds, tokens are weighed for it,
and nobody is alarmed. Its samples say what engines found in their caches."""

from __future__ import annotations

import sqlite3
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
    "engines.quantization=fp8",
    "engines.count=1",
    "learner.objective.old_logprobs=recompute",  # so that the difference is weighed by itself
    "run.num_steps=2",
    "learner.warm_start=null",
)
FRESH = "train/fresh_logprob_abs_diff"


def test_fp8_rounds_what_engines_draw_from_and_the_tokens_are_weighed(tmp_path: Path) -> None:
    with LiveRun("quickstart.yaml", tmp_path, SHORT) as run:
        summary = run.finish()
        ledger = run.folder / LEDGER_FILE
        steps = [step.metrics for step in read_steps(run.folder)]
        report = audit_ledger(ledger)
    first = steps[0]
    assert 1e-4 < (first[FRESH] or 0) < 0.1, "in float32 alone it is below 1e-5"
    assert first["train/mismatch_alarm"] == 0
    assert not summary.warnings
    assert (first["train/tis_abs"] or 0) > 1e-4
    assert report.is_clean
    with sqlite3.connect(ledger) as database:
        query = (
            "SELECT sum(num_cached_tokens) * 1.0 / sum(num_read_tokens), count(num_drafted_tokens) FROM samples "
            "WHERE version = 1"
        )
        share, num_drafted = database.execute(query).fetchone()
    assert (share, num_drafted) == (pytest.approx(first["rollout/prefix_cache_hit_rate"]), 0)
    assert share > 0.5, "three of four samples of a group find its prompt in the cache"
