"""What a rank of the learner and an engine need of a GPU, against the memory that the scenario names."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from penstock.runtime.cli.dry_run import show_plan
from penstock.runtime.preflight.gpu_memory import (
    learner_parts,
    megatron_stages,
    memory_outcome,
    needs_on_gpus,
    sleeping_bytes,
)
from penstock.runtime.run.node_plan import plan_nodes
from penstock.runtime.scenario import Scenario, load_scenario
from penstock.runtime.scenario.architecture import find_architecture
from penstock.runtime.scenario.shipped import shipped_scenarios

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.layout.memory import MemoryEstimate

OF_GPUS = {
    name: scenario
    for name, file in shipped_scenarios().items()
    for scenario in (load_scenario(file),)
    if scenario.learner.device.startswith("cuda") or scenario.engines.device.startswith("cuda")
}
LLAMA_WEIGHTS = 8_030_261_248


def shipped(name: str, *overrides: str) -> Scenario:
    return load_scenario(shipped_scenarios()[name], overrides)


def outcome(scenario: Scenario, gpu_gb: float | None = None) -> str:
    return memory_outcome(scenario, gpu_gb, ok="ok", failed="failed", left_out="left out")


@pytest.mark.parametrize("name", OF_GPUS)
def test_every_shipped_scenario_with_gpus_names_their_memory_and_fits(name: str) -> None:
    scenario = OF_GPUS[name]
    memory = scenario.runtime.gpu_memory_gb
    assert memory is not None
    assert outcome(scenario) == "ok"
    found = find_architecture(scenario)
    assert found is not None
    needs = list(needs_on_gpus(scenario, found.architecture))
    assert {need.key for need in needs} == {"learner", "engines"}
    assert all(need.size_bytes <= 0.85 * need.share * memory * 1e9 for need in needs), "libraries take a tenth more"
    if scenario.runtime.ray_address is None:
        nodes = plan_nodes(scenario, 8)
        assert nodes is not None
        assert not nodes.refusal


def test_each_family_has_a_scenario() -> None:
    families = {
        found.architecture.family.model_type for scenario in OF_GPUS.values() if (found := find_architecture(scenario))
    }
    assert families == {"llama", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3"}


def test_the_optimizer_of_nine_billion_weights_on_one_gpu_is_refused() -> None:
    scenario = shipped("glm4_9b_disaggregated", "learner.num_ranks=1")
    found = outcome(scenario)
    assert found.startswith("failed: learner: a rank takes about 192 GB")
    assert "of a GPU's 80 GB it has 80; give it more learner.num_ranks" in found
    assert outcome(scenario, gpu_gb=200) == "ok", "the option goes before the scenario"
    out = StringIO()
    assert show_plan(scenario, Console(file=out, width=400)) == 2
    assert "# GPU memory: learner: a rank takes about 192 GB" in out.getvalue()
    out = StringIO()
    show_plan(shipped("glm4_9b_disaggregated"), Console(file=out, width=400))
    assert "# GPU memory               ok" in out.getvalue() or "GPU memory: learner" not in out.getvalue()


def test_without_a_named_memory_nothing_is_refused_and_80_gb_are_said_to_be_assumed() -> None:
    scenario = shipped("glm4_9b_disaggregated", "learner.num_ranks=1", "runtime.gpu_memory_gb=null")
    assert outcome(scenario).startswith("left out: runtime.gpu_memory_gb names no memory. With 80 GB: learner: a rank")
    assert outcome(shipped("glm4_9b_disaggregated", "runtime.gpu_memory_gb=null")) == "ok"


def test_engines_and_ranks_of_megatron_are_looked_at_as_well() -> None:
    engines = outcome(shipped("qwen3_235b_a22b_128gpus", "engines.sglang.tp_size=2", "engines.sglang.ep_size=2"))
    assert engines.startswith("failed: engines: one GPU's share of the weights")
    assert "give a server more GPUs (sglang.tp_size)" in engines
    assert outcome(shipped("qwen3_8b_8gpus"), gpu_gb=40).startswith("failed: learner: a rank takes about 46")


def test_what_is_not_known_is_left_out() -> None:
    assert outcome(shipped("llama3_8b_8gpus", "model.config=null")) == (
        "left out: /models/Llama-3.1-8B-Instruct is not there, and model.config names no copy of its config.json"
    )


@pytest.mark.parametrize(
    ("overrides", "of_each_weight"),
    [
        ((), 16 / 4),
        (("learner.num_ranks=8",), 16 / 8),
        (("learner.num_ranks=8", "learner.shard_size=2"), 16 / 2),
        (("learner.num_ranks=8", "learner.shard_size=2", "learner.tensor_parallel=2"), 16 / 4),
        (("learner.num_ranks=8", "learner.tensor_parallel=8"), 16 / 8),
        (("learner.parallel=ddp",), 18),
        (("learner.parallel=ddp", "model.dtype=float32"), 16),
        (("learner.num_ranks=1",), 18),
        (("learner.cpu_offload=true",), 0),
        (("learner.objective.kl_coef=0.1",), (16 + 2) / 4),
        (("learner.lora.rank=8",), 2 / 4),
    ],
)
def test_ranks_of_the_torch_learner_need_so_much_of_each_weight(
    overrides: tuple[str, ...], of_each_weight: float
) -> None:
    def learner(*given: str) -> float:
        scenario = shipped("llama3_8b_8gpus", "learner.compile=false", *given)
        found = find_architecture(scenario)
        assert found is not None
        return next(iter(needs_on_gpus(scenario, found.architecture))).size_bytes

    is_float32 = "model.dtype=float32" in overrides
    besides = ("learner.cpu_offload=true", *(("model.dtype=float32",) if is_float32 else ()))
    besides += tuple(one for one in overrides if "num_ranks" in one or "tensor_parallel" in one)
    own = learner(*overrides) - learner(*besides)
    assert own == pytest.approx(of_each_weight * LLAMA_WEIGHTS)


def test_a_critic_on_ranks_of_its_own_takes_no_memory_of_the_policy() -> None:
    def learner(*given: str) -> list[tuple[str, float]]:
        scenario = shipped("llama3_8b_8gpus", "learner.compile=false", "learner.objective=ppo", *given)
        found = find_architecture(scenario)
        assert found is not None
        needs = needs_on_gpus(scenario, found.architecture)
        return [(need.what, need.size_bytes) for need in needs if need.key == "learner"]

    layout = ("learner.num_ranks=6", "learner.critic_ranks=2")
    [(_, beside)] = learner()
    [(_, policy), (what, critic)] = learner(*layout)
    [(_, policy_besides), (_, critic_besides)] = learner(*layout, "learner.cpu_offload=true")
    assert what == "a rank of the critic"
    assert beside - policy == pytest.approx(16 / 4 * LLAMA_WEIGHTS)
    assert policy - policy_besides == pytest.approx(16 / 4 * LLAMA_WEIGHTS)
    assert critic - critic_besides == pytest.approx(16 / 2 * LLAMA_WEIGHTS)
    assert critic_besides < policy_besides, "no logits"
    scenario = shipped("llama3_8b_8gpus", "learner.objective=ppo", "learner.num_ranks=5", "learner.critic_ranks=1")
    assert "learner: a rank of the critic takes about" in outcome(scenario)
    assert "give it more learner.critic_ranks" in outcome(scenario)


def test_with_megatron_neither_part_takes_memory_of_the_other() -> None:
    def stages(*given: str) -> list[MemoryEstimate]:
        scenario = shipped("qwen3_8b_8gpus", "learner.objective=ppo", *given)
        found = find_architecture(scenario)
        assert found is not None
        return [megatron_stages(scenario, found.architecture, part)[0] for part in learner_parts(scenario)]

    [both] = stages()
    policy, critic = stages("learner.num_ranks=8", "learner.critic_ranks=4")
    assert policy.total == both.total - both.critic
    assert policy.critic == critic.critic == critic.logits == 0
    assert critic.weights + critic.gradients + critic.optimizer == both.critic
    assert critic.activations == policy.activations
    [_, halved] = stages("learner.num_ranks=12", "learner.critic_ranks=8")
    assert halved.optimizer == critic.optimizer / 2, "divided over two data-parallel ranks"
    assert halved.weights == critic.weights
    scenario = shipped("qwen3_8b_8gpus", "learner.objective=ppo", "learner.num_ranks=8", "learner.critic_ranks=4")
    found = find_architecture(scenario)
    assert found is not None
    kept = [each.weights + each.optimizer + each.reference for each in (policy, critic)]
    assert sleeping_bytes(scenario, found.architecture) == 4 * sum(kept)
    assert "learner: a rank of the critic takes about 35" in memory_outcome(
        scenario, 30.0, ok="", failed="", left_out=""
    )


def test_scenarios_lie_where_they_are_looked_for() -> None:
    assert Path(shipped_scenarios()["llama3_8b_8gpus"]).is_file()
