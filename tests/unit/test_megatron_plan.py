"""What a dry run says of a Megatron learner: nodes, layout, memory and micro-batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.backends.learners.megatron.layout.layout import Layout, layout_of
from penstock.messages.errors import UserFault
from penstock.runtime.cli.dry_run import layout_text
from penstock.runtime.cli.tables import bytes_text, count_text, listed
from penstock.runtime.run.node_plan import plan_nodes
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.architecture import find_architecture

SCENARIOS = Path(__file__).parents[2] / "scenarios"
PLANS = {
    "qwen3_8b_8gpus": (8, 80.0),
    "qwen3_8b_colocated": (8, 80.0),
    "qwen3_30b_a3b_multinode": (32, 80.0),
    "qwen3_32b_64gpus": (64, 80.0),
    "qwen3_235b_a22b_128gpus": (128, 141.0),
    "glm4_5_air_64gpus": (64, 141.0),
    "deepseek_v3_128gpus": (128, 288.0),
    "moonlight_16b_16gpus": (16, 80.0),
}
"""Scenario, and the GPUs that its comment says: how many, and GB of each."""
PARAMETERS = {
    "qwen3_8b_8gpus": "8.19 billion",
    "qwen3_8b_colocated": "8.19 billion",
    "qwen3_30b_a3b_multinode": "30.5 billion",
    "qwen3_32b_64gpus": "32.8 billion",
    "qwen3_235b_a22b_128gpus": "235 billion",
    "glm4_5_air_64gpus": "107 billion",
    "deepseek_v3_128gpus": "671 billion",
    "moonlight_16b_16gpus": "16.0 billion",
}


def plan(name: str, *overrides: str, gpu_gb: float | None = None, gpus_per_node: int | None = None) -> str:
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", overrides)
    text = layout_text(scenario, gpu_gb=gpu_gb, gpus_per_node=gpus_per_node)
    assert all(line.startswith("#") for line in text.splitlines())
    return text.replace("\n# ", "\n").removeprefix("# ")


@pytest.mark.parametrize("name", PLANS)
def test_the_layouts_that_ship_fit_their_gpus_and_their_nodes(name: str) -> None:
    num_gpus, gpu_gb = PLANS[name]
    text = plan(name, gpu_gb=gpu_gb)
    found = re.search(r"  in all +\S+ GB +(\d+)% of a GPU's", text)
    assert found
    assert 30 <= int(found[1]) <= 85, "there is room for what is not counted, and no GPU is half empty in vain"
    assert f"{PARAMETERS[name]} parameters" in text
    assert "the weights are not on this machine" in text
    assert "slow:" not in text
    assert text.startswith(f"nodes: {num_gpus // 8} of 8 GPUs")
    assert "free" not in text.partition("\n\n")[0], "every GPU is used"
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    nodes = plan_nodes(scenario)
    assert nodes is not None
    assert sum(block.num_gpus for block in nodes.placement.blocks) == num_gpus


def test_the_whole_plan_of_one_node() -> None:
    assert plan("qwen3_8b_8gpus", "learner.objective.kl_coef=0.01", "learner.megatron.recompute=none") == (
        """\
nodes: 1 of 8 GPUs (--gpus-per-node)
  node 0  learner ranks 0–3; engine/0 … engine/3, 1 GPU each
#
learner: megatron, 4 ranks = tensor 4 × data 1, with sequence_parallel
  qwen3, 36 layers, 8.19 billion parameters
  as model.config says; the weights are not on this machine: there is no /models/Qwen3-8B
#
  axis    ranks  such as     on        each has
  tensor  4      0, 1, 2, 3  one node  8 of 32 heads (2 of 8 for keys), 37984 of 151936 rows of the vocabulary
  data    1      0           one node  about 512 of 512 samples
#
memory: the fullest rank, with micro-batches of 16384 tokens
  weights      4.10 GB  bfloat16
  gradients    8.19 GB  float32
  optimizer    24.6 GB  float32 weights and moments
  reference    4.10 GB  the policy as it was, for the KL
  activations  18.7 GB
  logits       7.47 GB  of one micro-batch
  in all       67.1 GB  84% of a GPU's 80 GB
#
batch: 512 samples, 1 optimizer step of 512
  each data-parallel rank runs at most 256 micro-batches of 16384 tokens a step, if all samples have the 8192 tokens of model.max_context
#
engines: 16.4 GB of weights on one GPU each
  mem_fraction_static 0.85 leaves 51.6 GB of 80 GB for the cache: 350060 tokens, 42 samples of model.max_context
#
"""  # noqa: E501
    )


def test_the_plan_in_the_docs_is_what_is_printed() -> None:
    page = (SCENARIOS.parent / "docs" / "megatron.md").read_text()
    shown = page.partition("```text\nnodes: ")[2].partition("```")[0]
    assert len(shown.splitlines()) > 20
    printed = plan("qwen3_30b_a3b_multinode").splitlines()
    assert [line for line in ("nodes: " + shown).splitlines() if line and line not in printed] == []


def test_stages_and_pieces_are_shown_with_what_they_wait() -> None:
    text = plan(
        "qwen3_8b_8gpus",
        "learner.megatron.tensor_parallel=1",
        "learner.megatron.pipeline_parallel=4",
        "learner.megatron.virtual_pipeline=3",
        "learner.groups_per_batch=2",
    )
    assert "pipeline  4      0, 1, 2, 3  one node  9 of 36 layers, in 3 pieces" in text
    assert "at most 8 micro-batches of 16384 tokens a step" in text
    assert f"stages wait for each other {3 / (3 * 8 + 3):.1%} of the time then" in text


def test_policy_and_critic_on_ranks_of_their_own_are_shown_apart() -> None:
    layout = ("learner.objective=ppo", "learner.num_ranks=12", "learner.critic_ranks=4", "engines.count=4")
    text = plan("qwen3_8b_8gpus", *layout, gpus_per_node=16, gpu_gb=80)
    tensor = "tensor 4 × data"
    with_sequences = ", with sequence_parallel"
    assert f"8 ranks of the policy = {tensor} 2{with_sequences} and 4 ranks of the critic = {tensor} 1" in text
    assert re.search(r"ranks of the critic\n  axis .*\n  tensor  4      8, 9, 10, 11 +one node", text)
    assert re.search(r"ranks of the policy\n  axis .*\n  tensor  4      0, 1, 2, 3 +one node", text)
    [policy, critic] = re.findall(r"memory: the fullest rank of the (?:policy|critic)(.*?in all)", text, re.DOTALL)
    assert "logits" in policy
    assert "logits" not in critic
    assert "critic  " not in policy


def test_who_shares_gpus_is_on_one_line() -> None:
    text = plan(
        "qwen3_8b_8gpus", "engines.placement=colocate", "engines.count=1", "engines.sglang.tp_size=4",
        "staleness={policy: sync}", "weights.transport=auto",
    )  # fmt: skip
    assert "  node 0  learner ranks 0–3 and engine/0, 4 GPUs between them; 4 GPUs free\n" in text


def test_what_each_side_needs_of_the_gpus_that_they_share_is_shown() -> None:
    text = plan("qwen3_8b_colocated", gpu_gb=80)
    assert "  node 0  learner ranks 0–7 and engine/0 … engine/3, 8 GPUs between them\n" in text
    assert "turns: of 8 GPUs, 8 with a rank of the learner\n" in text
    found = re.search(r"  in all +(\S+ GB) +(\d+)% of a GPU's", text)
    assert found
    assert f"  learner  {found[1]}   {found[2]}%" in text
    assert "  engines  64.0 GB   80%             mem_fraction_static 0.8: at least 8.79 GB, for weights and one" in text
    without_gradients = 2 * 8.19 + 4 * 3 * 8.19 + 2 * 8.19  # of two data-parallel ranks each has the weights
    assert f"the ranks keep {without_gradients:.0f} GB in the memory of their host" in text
    assert "turns: " not in plan("qwen3_8b_8gpus", gpu_gb=80)
    lent = ("engines.count=1", "engines.max=2", "engines.lent=1", "engines.sglang.tp_size=4", "weights.transport=auto")
    text = plan("qwen3_8b_8gpus", *lent, gpu_gb=80)
    assert "  node 0  learner ranks 0–3 and engine/1, 4 GPUs between them; engine/0, 4 GPUs\n" in text
    assert "turns: of 4 GPUs, 4 with a rank of the learner\n" in text
    on_cluster = plan("qwen3_8b_colocated", "runtime.ray_address=auto", gpus_per_node=8)
    assert on_cluster.startswith("nodes: 1 of 8 GPUs"), "shared GPUs count once"


def test_experts_over_several_nodes_are_called_slow() -> None:
    text = plan("qwen3_30b_a3b_multinode", gpus_per_node=4)
    assert "slow: expert groups lie over 2 nodes" in text
    assert "  tensor       4      0, 1, 2, 3   one node" in text


def test_what_a_cluster_cannot_give_is_said() -> None:
    text = plan("qwen3_8b_8gpus", "runtime.ray_address=auto", gpus_per_node=2)
    assert text.startswith(
        "nodes: 4 of 2 GPUs each (--gpus-per-node) have no place for all\n  learner: learner asked for"
    )


def test_what_does_not_fit_is_said_with_what_helps() -> None:
    text = plan("qwen3_8b_8gpus", "learner.megatron.recompute=none", gpu_gb=40)
    assert (
        "% of a GPU's 40 GB\n  does not fit; what helps here: recompute: full; more ranks, or optimizer_cpu_offload"
        in text
    )
    tight = plan("qwen3_8b_8gpus", "learner.megatron.recompute=none", gpu_gb=65)
    assert "  tight: libraries and gaps take about a tenth more; what helps here: " in tight


def test_an_engine_that_is_too_small_for_the_model_is_said_to_be() -> None:
    text = plan("qwen3_235b_a22b_128gpus", "engines.sglang.tp_size=4", "engines.count=16", gpu_gb=80)
    assert (
        "engines: 470 GB of weights on 4 GPUs each, 118 GB on one\n  which mem_fraction_static 0.88 of 80.0 GB" in text
    )
    assert "\nengines: " not in plan("qwen3_8b_8gpus", "engines.sglang.dp_size=2", "engines.count=2")


def test_without_gpus_the_memory_of_all_ranks_is_added_up() -> None:
    text = plan("learner_ranks", "learner.backend=megatron")
    assert text.startswith("learner: megatron, 2 ranks = data 2\n  qwen3, 2 layers, 103808 parameters\n")
    assert re.search(r"\n  in all +\S+ MB\n  \S+ MB of this machine for all ranks\n", text)


def test_a_model_of_which_nothing_is_here_is_said_to_be_unknown() -> None:
    text = plan("qwen3_8b_8gpus", "model.config=null")
    assert "neither layout nor memory were checked: /models/Qwen3-8B is not there" in text


def test_an_impossible_layout_is_refused_with_the_reason_and_the_nearest() -> None:
    with pytest.raises(UserFault) as refused:
        load_scenario(SCENARIOS / "qwen3_30b_a3b_multinode.yaml", ["learner.megatron.pipeline_parallel=5"])
    assert str(refused.value).endswith(
        "qwen3_30b_a3b_multinode.yaml:27: learner.megatron: tensor_parallel 4 × pipeline_parallel 5 × "
        "context_parallel 1 is 20, which does not divide 16 ranks; the nearest possible layout of 16 ranks is tensor 4 "
        "× pipeline 4 × expert 4 × data 1, with sequence_parallel"
    )


def test_groups_of_an_axis_are_those_of_the_places() -> None:
    layout = Layout(num_ranks=48, tensor=4, pipeline=2, context=2, expert=2, expert_tensor=3, sequence_parallel=True)
    first = layout.place(0)
    for axis, name in (("tensor", "tensor"), ("context", "context"), ("data", "data"), ("pipeline", "stage")):
        others = [other for other in ("tensor", "context", "data", "stage") if other != name]
        same = [
            rank
            for rank in range(48)
            if all(getattr(layout.place(rank), other) == getattr(first, other) for other in others)
        ]
        assert list(layout.group(axis)) == same  # type: ignore[arg-type]
    assert [layout.place(rank).expert for rank in layout.group("expert")] == [0, 1]
    assert {layout.place(rank)[4:] for rank in layout.group("expert data")} == {(0, 0)}


def test_sizes_are_written_with_three_digits() -> None:
    assert [bytes_text(size) for size in (12, 9_999, 1_500_000, 12.34e9, 999.7e9)] == [
        "12 B", "10.0 kB", "1.50 MB", "12.3 GB", "1.00 TB",
    ]  # fmt: skip
    assert [count_text(count) for count in (7, 30_532_122_624, 1e12)] == ["7", "30.5 billion", "1.00 trillion"]
    assert listed(range(4)) == "0, 1, 2, 3"
    assert listed(range(0, 64, 8)) == "0, 8, … 56"


def test_the_copies_of_configs_are_all_used() -> None:
    used = {load_scenario(file).model.config for file in SCENARIOS.glob("*.yaml")} - {None}
    assert used == {str(file) for file in (SCENARIOS / "models").glob("*.json")}
    for name in PLANS:
        scenario = load_scenario(SCENARIOS / f"{name}.yaml")
        found = find_architecture(scenario)
        assert found is not None
        assert found.architecture.max_positions >= scenario.model.max_context
        assert layout_of(scenario.learner.megatron, scenario.learner.num_ranks).data >= 1
