"""PPO with a critic under every layout, against the torch learner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trainer_plan as plan
from test_megatron_trainer import check_against_torch

from penstock.backends.learners.objectives.spec import objective

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

pytestmark = pytest.mark.megatron

CP2: dict[str, Any] = {"context_parallel": 2}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "one": ("qwen3", 1, {}, {"gae_length_alpha": 0.3, "critic_lambda": 1.0}),
    "data 2 with overlaps": ("qwen3", 2, plan.OVERLAPS, {"critic_only_steps": 1}),
    "tensor 2": ("qwen3", 2, plan.TP2, {}),
    "tensor 2, whole sequences": ("qwen3", 2, plan.TP2 | {"sequence_parallel": False}, {"critic_only_steps": 1}),
    "pipeline 2, tied": ("qwen3 tied", 2, plan.PP2, {"critic_only_steps": 1}),
    "virtual pipeline": ("qwen3", 2, plan.VIRTUAL, {}),
    "context 2": ("qwen3", 2, CP2, {"value_clip": None}),
    "expert 2": ("qwen3_moe", 2, {"expert_parallel": 2}, {}),
    "tensor 2 pipeline 2": ("qwen3", 4, plan.TP2 | plan.PP2, {}),
}


SHARED_IN_CI = ("one", "data 2 with overlaps", "tensor 2, whole sequences", "pipeline 2, tied", "context 2")
"""Each axis once. A critic of its own has all layouts of two ranks in CI, and so has the policy, whose layers a shared
one reads, in test_megatron_trainer.py."""


AT_NIGHT = "tensor 2 pipeline 2"
"""Four ranks; two have either of both."""


@pytest.mark.parametrize(
    ("case", "critic"),
    [pytest.param(case, "own", marks=[pytest.mark.slow] if case == AT_NIGHT else []) for case in CASES]
    + [pytest.param(case, "shared", marks=[] if case in SHARED_IN_CI else [pytest.mark.slow]) for case in CASES],
)
def test_values_and_policy_are_those_of_the_torch_learner(
    case: str, critic: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys, others = CASES[case]
    options = plan.learner_options(objective("ppo", critic=critic, **others), keys, num_updates=2)
    check_against_torch(tiny_family(family), options, ranks(num_ranks), num_ranks, plan.make_batches(2))


def test_values_beside_a_loss_that_couples_tokens(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    coupled = objective("ppo", critic="shared", old_logprobs="recompute", correction="mis")
    options = plan.learner_options(coupled, plan.TP2, num_updates=2)
    check_against_torch(tiny_family("qwen3"), options, ranks(2), 2, plan.make_batches(2))
