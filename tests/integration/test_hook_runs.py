"""Functions of the user's in a whole run: all of them at once, on one rank and on two; and one that fails ends the run
with one clear message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import FEW_LINES

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

FUNCTIONS = """
import torch


def reward(response: str) -> float:
    return sum(letter.isupper() for letter in response) / (len(response) + 1)


def centred(given):
    mean = sum(given.rewards) / len(given.rewards)
    return [reward - mean for reward in given.rewards]


def advantages(given, options):
    return given.samples.spread(given.rewards)


def weights(given, options):
    return torch.full_like(given.tokens_per_sample, 1.0 / max(1.0, float(given.tokens_per_sample.sum())))


def bounded(given, options):
    return (given.old_logprobs - given.rollout_logprobs).exp().clamp(max=2.0)


def without_first(given):
    own = given.sequence
    if len(own.trained) < 2:
        return None
    return own._replace(trained=own.trained[1:], rollout_logprobs=own.rollout_logprobs[1:],
                        positions=own.positions[1:], versions=own.versions[1:])


def before(given):
    return {"rollout/num_groups": len(given.groups)}


def after(given):
    return {"train/seen_version": given.version}


def same_name(name):
    return name


def failing(given):
    return given.rewards["first"]
"""
SHORT = (
    *FEW_LINES, "run.num_steps=2", "model.make=xs", "learner.warm_start=null", "learner.max_tokens_per_micro_batch=64",
)  # fmt: skip


def overrides(folder: Path) -> list[str]:
    file = folder / "mine.py"
    file.write_text(FUNCTIONS)
    return [*SHORT, f"reward.function={file}:reward"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_a_function_in_every_place_loses_nothing(tmp_path: Path, num_ranks: int) -> None:
    file = tmp_path / "mine.py"
    functions = (
        f"learner.objective.postprocess_function={file}:centred",
        f"learner.objective.advantage_function={file}:advantages",
        f"learner.objective.reduction_function={file}:weights",
        "learner.objective.old_logprobs=recompute",
        f"learner.objective.importance_function={file}:bounded",
        f"learner.conversion_function={file}:without_first",
        f"learner.rollout_log_function={file}:before",
        f"learner.step_log_function={file}:after",
        f"weights.names_function={file}:same_name",
        f"learner.num_ranks={num_ranks}",
    )
    with LiveRun("fully_async.yaml", tmp_path, [*overrides(tmp_path), *functions]) as run:
        summary = run.finish()
        folder = run.folder
    assert summary.completed
    assert summary.restarts == ()
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    steps = [step.metrics for step in read_steps(folder)]
    assert [step["train/seen_version"] for step in steps] == [1, 2]
    assert all(step["rollout/num_groups"] == 4 for step in steps)
    assert all(step["rollout/rewards"] == pytest.approx(0.0, abs=1e-6) for step in steps)
    assert all((step["train/num_masked_tokens"] or 0) >= 8 for step in steps)


def test_a_function_that_fails_ends_the_run_with_one_message(tmp_path: Path) -> None:
    function = f"learner.objective.postprocess_function={tmp_path / 'mine.py'}:failing"
    with LiveRun("fully_async.yaml", tmp_path, [*overrides(tmp_path), function]) as run:
        assert run.process.wait(240) != 0
        output = run.output
    said = " ".join(output.split())
    assert "learner.objective.postprocess_function: failing raised TypeError" in said
    assert "mine.py:" in said
    assert "Traceback" not in output
