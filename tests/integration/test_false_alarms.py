"""Right runs raise no alarm, and the benchmark that says so hears one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from penstock.backends.learners.torch.kept_warm_start import NOT_COMPUTED
from penstock.benchmarks.false_alarms import heard_in, main

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.benchmarks._runs import FinishedRun


def test_alarms_failed_publishes_and_warnings_of_the_learner_are_heard(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    journal = '[1.0,"learner",1,"PublishFailed","version 3"]\n[2.0,"learner",1,"BatchTrained",""]\n'
    (tmp_path / "events" / "learner-1.jsonl").write_text(journal)
    steps = [
        SimpleNamespace(metrics={"train/fresh_logprob_abs_diff": nats, "train/mismatch_alarm": float(nats > 0.1)})
        for nats in (1e-6, 0.2)
    ]
    steps.append(SimpleNamespace(metrics={"train/mixed_logprob_abs_diff": 0.7}))
    kept = f"learner: {NOT_COMPUTED}: its weights are those of an earlier run"
    summary = SimpleNamespace(warnings=("learner: step 2: …", "scorer: rewards have been equal", kept))
    finished = cast("FinishedRun", SimpleNamespace(folder=tmp_path, steps=steps, summary=summary))
    heard = heard_in(finished)
    assert heard == (2, 1, 1, 0.2, 0.7, ("learner: step 2: …",))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_one_runs_of_the_shipped_scenarios_raise_no_alarm() -> None:
    assert main([]) == 0
