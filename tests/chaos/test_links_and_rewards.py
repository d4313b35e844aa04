"""Links that are cut, lossy, repetitive, out of order, late or noisy; reward functions that misbehave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos_run import ChaosRun

from penstock.messages.errors import UserFault
from penstock.runtime.chaos.faults import LINK_FAULTS, ChaosKind

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

LINKS = (
    "cut:scorer>filter+2",
    "restore:scorer>filter",
    "drop:engine/0>scorer+3=0.5",
    "duplicate:scorer>filter+3=0.5",
    "reorder:filter>buffer+3=0.5",
    "delay:buffer>learner+3=0.1",
    "truncate:engine/1>scorer+3=0.3",
    "garbage:engine/0>prompt_source+3=0.5",
    "garbage:prompt_source>engine/1+1=0.3",
    "drop:learner>buffer+3=0.5",
)
REWARDS = ("reward_hang", "reward_throw", "reward_nan", "reward_exit")


def test_a_run_survives_bad_links_and_loses_nothing(tmp_path: Path) -> None:
    run = ChaosRun(tmp_path, "modelled.yaml", LINKS, seed=11, overrides=("run.num_steps=60",))
    run.assert_clean()
    assert set(run.verdict.hits) == LINK_FAULTS - {ChaosKind.RESTORE}
    assert "dropped (" in run.logs(), "some actor has met a frame that it could not read, and said so"
    assert run.verdict.restarts == {}, "a bad link is nobody's death"


def test_a_reward_function_that_misbehaves_costs_time_and_no_sample(tmp_path: Path) -> None:
    overrides = ("run.num_steps=12", "reward.timeout_s=3", "learner.save_every=4")
    run = ChaosRun(tmp_path, "torch.yaml", (*REWARDS, *REWARDS), seed=12, overrides=overrides)
    run.assert_clean()
    assert run.verdict.restarts == {}


def test_a_modelled_run_has_no_reward_function_that_could_misbehave(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"reward_nan.*simulated"):
        ChaosRun(tmp_path, "modelled.yaml", ("reward_nan",), seed=1)
    assert not list(tmp_path.iterdir()), "nothing was started"
