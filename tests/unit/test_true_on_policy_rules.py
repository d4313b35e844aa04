"""What ``learner.true_on_policy`` cannot be had with is refused before the run, with the key and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.scenario.load import load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "true_on_policy.yaml"
SERVED = ("engines.backend=sglang", "engines.device=cuda", "learner.device=cuda", "model.dtype=bfloat16")
DETERMINISTIC = ("engines.sglang.enable_deterministic_inference=true", "engines.sglang.rl_on_policy_target=fsdp")


def test_the_shipped_scenario_is_one() -> None:
    assert load_scenario(SCENARIO, []).learner.true_on_policy


def test_servers_on_gpus_need_both_flags_and_an_attention_that_can() -> None:
    scenario = load_scenario(SCENARIO, [*SERVED, *DETERMINISTIC, "engines.sglang.attention_backend=fa3"])
    assert scenario.engines.sglang["rl_on_policy_target"] == "fsdp"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["staleness.policy=one_step_off"], "staleness.policy: .* found max_staleness 1 .* set policy: sync"),
        (["staleness.policy=fully_async", "staleness.max_staleness=0"], "staleness.policy: .* update_mode in_flight"),
        (["learner.num_updates=2"], "learner.num_updates: the policy has moved after one update; found 2"),
        (["learner.num_passes=3"], "learner.num_passes: .* found 3"),
        (["learner.compile=true"], "learner.compile: kernels that are compiled round otherwise"),
        (["learner.lora={}"], "learner.lora: engines multiply with merged weights"),
        (["learner.backend=megatron"], "learner.backend: .* is for torch; found megatron"),
        (["model.dtype=bfloat16"], "model.dtype: .* float32; found bfloat16"),
        (["engines.device=auto"], "engines.device: .* found auto, .* set it to cpu"),
        (["engines.num_threads=2"], "engines.num_threads: threads divide sums by their number; found 2"),
        (["learner.num_threads=2"], "learner.num_threads: threads divide sums by their number; found 2"),
        (["learner.device=auto"], "learner.device: .* found auto, set it to cpu"),
        (["engines.more=[{backend: recorded}]"], "engines.more: .* found recorded, torch"),
        (["engines.backend=sglang"], "engines.device: an SGLang server cannot infer deterministically on a CPU"),
        ([*SERVED], "engines.sglang: .* enable_deterministic_inference: true, rl_on_policy_target: fsdp"),
        ([*SERVED, DETERMINISTIC[0]], "engines.sglang: .* rl_on_policy_target: fsdp"),
        (
            [*SERVED, *DETERMINISTIC, "engines.sglang.attention_backend=torch_native"],
            r"engines.sglang: .* an attention backend that can \(ascend, fa3",
        ),
        ([*SERVED, "engines.addresses=[http://10.0.0.7:30000]"], "engines.addresses: .* started here"),
        ([*SERVED, *DETERMINISTIC, "learner.device=cpu"], "learner.device: .* found cpu, set it to auto"),
    ],
)
def test_what_would_change_a_bit_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserFault) as raised:
        load_scenario(SCENARIO, overrides)

    assert re.search(said, " ".join(str(raised.value).split())), str(raised.value)
