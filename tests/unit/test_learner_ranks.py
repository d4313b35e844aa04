"""Where the ranks of a learner go, what they cannot be combined with, and what a dry run says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backends.learners.worker_group.backend import WorkerGroupBackend
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER
from penstock.runtime.cli.dry_run import placement_text
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.open_backend import open_backend
from penstock.runtime.run.placement import Block, place
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.scenario import Scenario, broken_rule
from penstock.runtime.scenario.resolve import resolve

if TYPE_CHECKING:
    from pathlib import Path


def scenario(learner: dict[str, Any], engines: dict[str, Any] | None = None, **blocks: object) -> Scenario:
    data = {
        "run": {"name": "ranks"},
        "model": {"make": "xs"},
        "data": {"path": "lines:100"},
        "reward": {"function": "lines"},
        "sampling": {"max_response_tokens": 64},
        "staleness": {"policy": "sync"},
        "engines": engines or {},
        "learner": learner,
        **blocks,
    }
    return resolve(msgspec.convert(data, Scenario))


def nodes(*num_gpus: int) -> list[NodeGpus]:
    return [NodeGpus(f"node{index}", num) for index, num in enumerate(num_gpus)]


def sglang(tp_size: int, **more: object) -> dict[str, Any]:
    return {"backend": "sglang", "sglang": {"tp_size": tp_size}, **more}


def test_every_rank_gets_a_gpu_of_its_own_on_one_node() -> None:
    placement = place(scenario({"num_ranks": 4}, sglang(2)), nodes(2, 4, 3))
    assert placement.block_of(LEARNER) == Block((LEARNER,), 4, ("node1",))
    assert placement.block_of("engine/0") == Block(("engine/0",), 2, ("node0",))
    assert placement.num_learner_ranks == 4


def test_ranks_do_not_share_gpus_with_embedded_engines() -> None:
    placement = place(scenario({"num_ranks": 2}, {"count": 2}), nodes(3))
    assert placement.block_of(LEARNER) == Block((LEARNER,), 2, ("node0",))
    assert placement.block_of("engine/0") == Block(("engine/0", "engine/1"), 1, ("node0",))


def test_where_there_is_no_gpu_ranks_with_any_device_are_on_the_cpu() -> None:
    assert place(scenario({"num_ranks": 8}), nodes(0, 0)).blocks == ()


@pytest.mark.parametrize(
    ("num_gpus", "said"),
    [
        (
            (2, 2),
            "learner: learner asked for 3 GPUs; engine/0 asked for 1 GPU. 4 are free, 2 + 2 on 2 nodes. Every node ",
        ),
        (
            (2, 2),
            "gets equally many ranks of a learner, and all of a tensor-parallel group are on one; the most that fit",
        ),
        ((0, 1), "No rank of the learner fits beside the others"),
    ],
)
def test_ranks_that_do_not_fit_on_a_node_are_refused_with_the_number_that_would(
    num_gpus: tuple[int, ...], said: str
) -> None:
    engines = sglang(1) if num_gpus == (0, 1) else {}
    with pytest.raises(UserFault) as raised:
        place(scenario({"num_ranks": 3}, engines), nodes(*num_gpus))
    assert said in str(raised.value)


def test_colocated_ranks_use_the_first_gpus_of_the_engine() -> None:
    placement = place(scenario({"num_ranks": 2}, sglang(4, placement="colocate")), nodes(4))
    assert placement.blocks == (Block(("engine/0", LEARNER), 4, ("node0",)),)
    assert placement.num_learner_ranks == 2


def test_more_ranks_than_the_engine_that_they_are_with_has_gpus_are_refused() -> None:
    with pytest.raises(UserFault, match="has 1 on a node, and each of 2 ranks needs one of its own"):
        place(scenario({"num_ranks": 2}, {"placement": "colocate"}), nodes(4))
    engines = sglang(2, placement="colocate")
    for crowded, said in (
        ({**engines, "count": 1}, "the engine, which has 2, and each of 6 ranks needs one of its own"),
        ({**engines, "count": 2}, "the 2 engines, which together have 4, and each of 6 ranks"),
    ):
        found = broken_rule(scenario({"num_ranks": 6, "device": "cuda"}, crowded))
        assert found is not None
        assert found[0] == ("learner", "num_ranks")
        assert said in found[1]
    enough = {**engines, "count": 3, "device": "cuda"}
    assert broken_rule(scenario({"num_ranks": 6, "device": "cuda"}, enough)) is None
    enough["sglang"] = {"tp_size": 2, "nnodes": 2}
    found = broken_rule(scenario({"num_ranks": 6, "device": "cuda"}, enough))
    assert found is not None
    assert "which have to be on one node" in found[1]


@pytest.mark.parametrize(
    ("learner", "key", "said"),
    [
        ({"device": "cuda:1"}, "device", "cuda:1 is one device, and each of 2 ranks needs one"),
        ({"rank_timeout_s": 4000.0}, "rank_timeout_s", "set it below learner.step_timeout_s, which is 3600"),
    ],
)
def test_what_ranks_cannot_be_combined_with_is_said(learner: dict[str, Any], key: str, said: str) -> None:
    found = broken_rule(scenario({"num_ranks": 2, **learner}))
    assert found is not None
    assert found[0] == ("learner", key)
    assert said in found[1]
    assert broken_rule(scenario({"num_ranks": 1, **learner})) is None


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"num_ranks": 4, "shard_size": 3}, "learner.num_ranks, 4, is no multiple of it; set it to a divisor of that"),
        ({"num_ranks": 1, "shard_size": 2}, "learner.num_ranks, 1, is no multiple of it"),
        ({"num_ranks": 4, "shard_size": 2, "parallel": "ddp"}, "with learner.parallel: ddp; remove it"),
        ({"num_ranks": 4, "shard_size": 2, "backend": "megatron"}, "found learner.backend: megatron"),
    ],
)
def test_copies_of_the_weights_are_shared_out_evenly_by_fsdp(learner: dict[str, Any], said: str) -> None:
    found = broken_rule(scenario(learner))
    assert found is not None
    assert found[0] == ("learner", "shard_size")
    assert said in found[1]
    for size in (2, 4):
        assert broken_rule(scenario({"num_ranks": 4, "shard_size": size})) is None


@pytest.mark.parametrize(
    ("learner", "key", "said"),
    [
        ({"num_ranks": 3, "tensor_parallel": 2}, "tensor_parallel", "learner.num_ranks, 3, is no multiple of it"),
        ({"num_ranks": 2, "tensor_parallel": 2, "parallel": "ddp"}, "tensor_parallel", "fsdp, found ddp; set it to"),
        (
            {"num_ranks": 2, "tensor_parallel": 2, "lora": {"rank": 4}},
            "tensor_parallel",
            "to 1 with learner.lora",
        ),
        ({"num_ranks": 4, "tensor_parallel": 2, "backend": "megatron"}, "tensor_parallel", "megatron.tensor_parallel"),
        (
            {"num_ranks": 4, "tensor_parallel": 2, "shard_size": 4},
            "shard_size",
            "the 2 of learner.tensor_parallel",
        ),
    ],
)
def test_ranks_that_compute_together_are_equally_many(learner: dict[str, Any], key: str, said: str) -> None:
    found = broken_rule(scenario(learner))
    assert found is not None
    assert found[0] == ("learner", key)
    assert said in found[1]


def test_ranks_that_compute_together_divide_the_heads() -> None:
    found = broken_rule(scenario({"num_ranks": 2, "tensor_parallel": 2}))
    said = "2 does not divide the 1 key-value heads of the model; set it to a divisor of 1"
    assert found == (("learner", "tensor_parallel"), said)


GAE = {"name": "ppo", "estimator": "gae", "critic": "own"}
PPO: dict[str, Any] = {"num_ranks": 4, "critic_ranks": 2, "objective": GAE}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"objective": {"name": "dapo"}}, "there is no critic; set it to 0"),
        ({"objective": {**GAE, "critic": "shared"}}, "a head on the policy itself, whose ranks it needs"),
        ({"critic_ranks": 4}, "learner.num_ranks, 4, counts those of both; set that to 5 or more"),
        ({"num_ranks": 1, "critic_ranks": 1}, "learner.num_ranks, 1, counts those of both; set that to 2 or more"),
        ({"critic_ranks": 1, "shard_size": 2}, "leaves 3 ranks to the policy, and 2 (learner.shard_size) does not"),
        ({"critic_ranks": 1, "cpu_offload": True}, "leaves one rank to the critic, which has no shards"),
    ],
)
def test_a_critic_on_ranks_of_its_own_is_one_that_there_is_and_leaves_ranks_to_the_policy(
    keys: dict[str, Any], said: str
) -> None:
    found = broken_rule(scenario(PPO | keys))
    assert found is not None
    assert found[0] == ("learner", "critic_ranks")
    assert said in found[1]
    assert broken_rule(scenario(PPO | {"shard_size": 2})) is None


def test_parts_that_ranks_do_not_compute_together_in_are_refused() -> None:
    layout = {"num_ranks": 4, "critic_ranks": 1, "tensor_parallel": 2}
    found = broken_rule(scenario(PPO | layout, model={"make": "m"}))
    assert found is not None
    assert "leaves 3 ranks to the policy, and 2 (learner.tensor_parallel) does not divide that" in found[1]
    assert broken_rule(scenario(PPO | layout | {"critic_ranks": 2}, model={"make": "m"})) is None


def test_megatron_divides_the_ranks_of_policy_and_critic_alike_or_not_at_all() -> None:
    keys = PPO | {"backend": "megatron", "megatron": {"tensor_parallel": 2}}
    assert broken_rule(scenario(keys, model={"make": "m"})) is None
    for critic_ranks, said in ((1, "ranks of the policy: tensor_parallel 2"), (3, "ranks of the policy: tensor_par")):
        found = broken_rule(scenario(keys | {"critic_ranks": critic_ranks}, model={"make": "m"}))
        assert found is not None
        assert found[0] == ("learner", "megatron")
        assert said in found[1]
    found = broken_rule(scenario(keys | {"num_ranks": 5, "critic_ranks": 3}, model={"make": "m"}))
    assert found is not None
    assert "ranks of the critic (learner.critic_ranks): tensor_parallel 2" in found[1]
    assert "does not divide 3 ranks" in found[1]


def test_a_simulated_learner_is_not_divided() -> None:
    found = broken_rule(scenario({"num_ranks": 2, "backend": "simulated"}, {"backend": "simulated"}))
    assert found is not None
    assert "a simulated learner is not divided" in found[1]


def test_a_dry_run_counts_the_ranks() -> None:
    text = placement_text(scenario({"num_ranks": 4, "num_threads": 2}, sglang(2)))
    assert "learner           5          2             auto    torch, 4 ranks, 1 GPU each where there are any" in text
    assert "; asks for 6 GPUs where there are any" in text
    on_cpu = placement_text(scenario({"num_ranks": 2, "device": "cpu"}))
    assert "torch, 2 ranks\n" in on_cpu
    assert "torch, 4 ranks (2 of the policy, 2 of the critic), 1 GPU each" in placement_text(scenario(PPO, sglang(2)))


def test_several_ranks_are_a_worker_group(tmp_path: Path) -> None:
    plan = RunPlan(
        scenario=scenario({"num_ranks": 2}),
        run_id="ranks",
        run_folder=str(tmp_path),
        model_folder=str(tmp_path),
        num_rows=1,
    )
    assert isinstance(open_backend(LEARNER, plan, epoch=3), WorkerGroupBackend)
