"""No text makes a checker of reasoning-gym slow."""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json

import pytest

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS
from test_rewards_time import assert_quick

from penstock.backends.data.generated import reasoning_gym_rows
from penstock.backends.rewards.functions import REWARD, load_function


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"}))
def test_every_checker_of_reasoning_gym_is_bounded(name: str) -> None:
    (row, *_) = reasoning_gym_rows(f"reasoning_gym:{name}:1", f"{name}:1", seed=3)
    reward = load_function(REWARD, "reasoning_gym").function
    metadata = json.loads(json.dumps(row.metadata))
    assert_quick(lambda text: reward(response=f"<answer>{text}</answer>", metadata=metadata))
    assert_quick(lambda text: reward(response=text[:16_000], metadata=metadata))
