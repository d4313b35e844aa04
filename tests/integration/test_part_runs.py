"""Parts of a run, and the first step of a whole one, on Ray and ZMQ with the embedded engine and learner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import SMALL_BATCHES

from penstock.backends.ledger.archived_groups import read_archived
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.trackers import StepRow

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(400)]

SMALL = (*SMALL_BATCHES, "run.num_steps=3", "learner.warm_start.num_steps=60")
MOVING = (
    "learner.objective=grpo",
    "learner.objective.kl_coef=0.1",
    "learner.objective.old_logprobs=recompute",
    "learner.objective.entropy_coef=0.01",  # moves the policy also where no answer earns anything
)
EXACT = 1e-8


def trained_weights(folder: Path, version: int) -> bytes:
    (checkpoint,) = (folder / "checkpoints").glob(f"version-{version:07d}*")
    return (checkpoint / "model.safetensors").read_bytes()


def begun(scenario: str, parent: Path, arguments: Sequence[str]) -> LiveRun:
    parent.mkdir()
    return LiveRun(scenario, parent, arguments)


def figure(step: StepRow, name: str) -> float:
    value = step.metrics[name]
    assert value is not None
    return value


def learned(step: StepRow) -> dict[str, float | None]:
    """What a step says of the training, and not of the time that it took, nor of the engines."""
    of_engines = ("rollout/prefix_cache_hit_rate", "rollout/spec_accept_rate")
    metrics = step.metrics.items()
    return {name: v for name, v in metrics if name.startswith(("train/", "rollout/")) and name not in of_engines}


def test_the_first_step_has_not_moved_and_recorded_batches_train_to_the_same_bits(tmp_path: Path) -> None:
    arguments = (*SMALL, *MOVING, "learner.save_every=1", "learner.keep_checkpoints=1")
    with begun("fully_async.yaml", tmp_path / "whole", (*arguments, "--keep-samples")) as run:
        whole = run.finish()
        source = run.folder
    first, *_ = steps = read_steps(source)
    assert abs(figure(first, "train/ppo_kl")) < EXACT
    assert 0 <= figure(first, "train/kl_loss") < EXACT
    assert figure(first, "train/train_rollout_logprob_abs_diff") <= 1e-4
    assert figure(first, "train/mismatch_alarm") == 0
    assert figure(steps[1], "train/kl_loss") > EXACT, "afterwards it has moved"
    assert whole.warnings == ()
    # Of the last batch alone the ledger still has the samples; those of the others are in the files.
    again = (*arguments, "--only", "learner", "--from", str(source))
    with begun("fully_async.yaml", tmp_path / "again", again) as run:
        summary = run.finish()
        folder = run.folder
    assert trained_weights(folder, 3) == trained_weights(source, 3)
    assert [learned(step) for step in read_steps(folder)] == [learned(step) for step in steps]
    assert [figure(step, "perf/actor_train_tflops") > 0 for step in steps] == [True] * 3
    assert "perf/mfu" not in first.metrics, "nobody knows the peak of this CPU"
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    assert summary.balance == whole.balance
    assert sorted(cost.name for cost in summary.costs) == ["buffer", "learner"]


@pytest.mark.slow  # two more real runs
def test_groups_are_collected_and_trained_afterwards_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    collect = (*SMALL, "--only", "rollout", "--num-groups", "12")
    with begun("sync.yaml", tmp_path / "rollout", collect) as run:
        summary = run.finish()
        source, output = run.folder, run.output
    assert summary.completed
    assert summary.story == "12 groups collected of 12"
    assert summary.balance.in_system == 12 * 8
    assert audit_ledger(source / LEDGER_FILE).findings == ()
    groups = list(read_archived(source / "samples" / "collected.parquet"))
    assert len(groups) == 12
    assert {span.version for g in groups for s in g.samples for part in s.parts for span in part.spans} == {0}
    assert "12 groups, 96 samples" in output
    assert [step.num_steps for step in read_steps(source)] == [2, 2]
    # Another objective on the same data; and at another temperature than it was sampled at.
    changed = ("learner.objective=reinforce_plus_plus_baseline", "sampling.temperature=0.5")
    train = (*SMALL, *changed, "observability.report=true")
    with begun("sync.yaml", tmp_path / "learner", (*train, "--only", "learner", "--from", str(source))) as run:
        trained = run.finish()
        folder, output = run.folder, run.output
    steps = read_steps(folder)
    assert [step.version for step in steps] == [1, 2]
    assert trained.story == "2 batches trained of 3: no more were recorded"
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    warning = "step 1: the log-probs of engine and learner differ by"
    assert figure(steps[0], "train/mismatch_alarm") == 1
    assert len(trained.warnings) == 1
    assert warning in trained.warnings[0]
    assert warning in " ".join(output.split())
    assert warning in (folder / "report.html").read_text()
