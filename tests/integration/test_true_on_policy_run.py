"""Whole runs with ``learner.true_on_policy``: engine and learner differ by 0 in every step, and a kernel that is
planted in the learner's process ends the run at its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import FEW_LINES

from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

FUNCTIONS = """
def reward(response: str) -> float:
    return sum(letter.isupper() for letter in response) / (len(response) + 1)


def plant(given):  # in the learner's process, before it trains a batch
    from transformers.models.qwen3 import modeling_qwen3

    def forward(self, states):
        return self.weight * (states / (states.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt())

    modeling_qwen3.Qwen3RMSNorm.forward = forward
    return {}
"""
SHORT = (
    *FEW_LINES, "run.num_steps=3", "model.max_context=64", "learner.warm_start=null",
    "learner.max_tokens_per_micro_batch=64",
)  # fmt: skip


def overrides(folder: Path) -> list[str]:
    file = folder / "mine.py"
    file.write_text(FUNCTIONS)
    return [*SHORT, f"reward.function={file}:reward"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_difference_is_exactly_0_in_every_step(tmp_path: Path, num_ranks: int) -> None:
    with LiveRun("true_on_policy.yaml", tmp_path, [*overrides(tmp_path), f"learner.num_ranks={num_ranks}"]) as run:
        summary = run.finish()
        steps = [step.metrics for step in read_steps(run.folder)]
    assert [step["train/largest_logprob_abs_diff"] for step in steps] == [0.0, 0.0, 0.0]
    assert summary.max_logprob_abs_diff == 0.0
    assert all((step["train/grad_norm"] or 0) > 0 for step in steps)


def test_a_kernel_that_differs_ends_the_run_at_its_first_step(tmp_path: Path) -> None:
    planted = f"learner.rollout_log_function={tmp_path / 'mine.py'}:plant"
    with LiveRun("true_on_policy.yaml", tmp_path, [*overrides(tmp_path), planted]) as run:
        assert run.process.wait(240) == 2
        said = " ".join(run.output.split())
    assert "step 1: learner.true_on_policy is true, and engine and learner differ at" in said
    assert "token" in said
    assert "Traceback" not in said
