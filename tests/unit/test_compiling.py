"""Which models of a torch learner are compiled, what a dry run counts for them, and what is refused beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.backends.learners.compiling import LEAST_WEIGHTS, is_compiled
from penstock.backends.learners.options import LearnerOptions
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.gpu_memory import needs_on_gpus
from penstock.runtime.scenario.architecture import find_architecture
from penstock.runtime.scenario.load import load_scenario
from penstock.runtime.scenario.shipped import shipped_scenarios

FITTING: dict[str, Any] = {
    "is_on_gpu": True, "dtype": "bfloat16", "num_weights": LEAST_WEIGHTS, "has_experts": False, "num_ranks": 1,
}  # fmt: skip


def options(**keys: object) -> LearnerOptions:
    return msgspec.convert(keys, LearnerOptions)


@pytest.mark.parametrize(
    "other",
    [
        {"is_on_gpu": False},
        {"dtype": "float32"},
        {"num_weights": LEAST_WEIGHTS - 1},
        {"has_experts": True},
        {"num_ranks": 2},
    ],
)
def test_it_is_compiled_where_that_is_known_to_pay(other: dict[str, Any]) -> None:
    assert is_compiled(options(), **FITTING)
    assert not is_compiled(options(), **FITTING | other)
    assert is_compiled(options(compile=True), **FITTING | other)
    assert not is_compiled(options(compile=False), **FITTING)
    for key in ("activation_checkpointing", "true_on_policy"):
        assert not is_compiled(options(**{key: True}), **FITTING)


def test_sharded_blocks_are_refused() -> None:
    file = shipped_scenarios()["llama3_8b_8gpus"]
    with pytest.raises(UserFault, match=r"learner\.compile: .* set learner\.parallel: ddp"):
        load_scenario(Path(file), ["learner.compile=true"])
    load_scenario(Path(file), ["learner.compile=true", "learner.parallel=ddp"])


def test_a_dry_run_counts_what_compiled_blocks_keep() -> None:
    def size_bytes(*overrides: str) -> float:
        scenario = load_scenario(
            Path(shipped_scenarios()["llama3_8b_8gpus"]),
            ["learner.num_ranks=1", "learner.activation_checkpointing=false", *overrides],
        )
        found = find_architecture(scenario)
        assert found is not None
        return next(iter(needs_on_gpus(scenario, found.architecture))).size_bytes

    plain, compiled = size_bytes("learner.compile=false"), size_bytes()
    assert compiled == size_bytes("learner.compile=true") < plain
    vocabulary, least_tokens = 128_256, 1024
    assert plain - compiled > 2 * 4 * vocabulary * least_tokens, "logits are not kept in float32, and more"
