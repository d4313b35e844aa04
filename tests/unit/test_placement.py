"""Who gets which GPUs of which nodes, and what a cluster cannot give."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.backends.engines.served.sglang.size import engine_size
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, engine_name
from penstock.runtime.cli.dry_run import placement_text
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import (
    ANY_NODE,
    Block,
    Placement,
    colocated,
    has_nodes_of_its_own,
    late_block,
    num_gpus_asked,
    place,
)
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.resolve import resolve


def scenario(engines: dict[str, Any], **blocks: object) -> Scenario:
    data = {"run": {"name": "x"}, "data": {"path": "rows.jsonl"}, "engines": engines, **blocks}
    return msgspec.convert(data, Scenario)


def sglang(count: int, tp_size: int, **options: int) -> dict[str, Any]:
    return {"backend": "sglang", "count": count, "sglang": {"tp_size": tp_size, **options}}


def nodes(*num_gpus: int) -> list[NodeGpus]:
    return [NodeGpus(f"node{index}", num) for index, num in enumerate(num_gpus)]


def places(placement: Placement) -> dict[str, Block]:
    return {name: block for block in placement.blocks for name in block.members}


# --- the size of an engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_gpus"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 4, "pp_size": 2}, 8),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, 6),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"tp_size": 8, "attn_dp_size": 8}, 8),
        ({"tp_size": 4, "dp_size": 2, "attn_dp_size": 4, "enable_dp_attention": True}, 8),
        ({"tp_size": 8, "ep_size": 8, "moe_dp_size": 2, "disaggregation_mode": "prefill"}, 8),
    ],
)
def test_an_engine_takes_the_gpus_that_its_options_say(options: dict[str, Any], num_gpus: int) -> None:
    assert engine_size(options).num_gpus == num_gpus


@pytest.mark.parametrize(
    ("options", "node_counts"),
    [
        ({"tp_size": 4}, (1, 2, 4)),
        ({"tp_size": 6, "nnodes": 3}, (3,)),
        ({"tp_size": 4, "pp_size": 3}, (1, 3, 6, 12)),  # never two: three stages do not divide over them
        ({"tp_size": 4, "dp_size": 2}, (1,)),
    ],
)
def test_an_engine_is_divided_only_over_nodes_that_its_ranks_divide_over(
    options: dict[str, Any], node_counts: tuple[int, ...]
) -> None:
    assert engine_size(options).node_counts == node_counts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp_size": "two"}, "tp_size: must be a whole number, at least 1; found 'two'"),
        ({"tp_size": True}, "tp_size: must be a whole number"),
        ({"tp_size": 4, "nnodes": 3}, "cannot be divided over 3 nodes; set it to 1 or 2 or 4"),
        ({"tp_size": 4, "dp_size": 2, "nnodes": 2}, "whose sets stay on one node, cannot be divided over 2 nodes"),
    ],
)
def test_sizes_that_no_server_can_have_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserFault, match=said):
        engine_size(options)


# --- the placement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "num_engines", "per_gpu"),
    [(1, 1, 2), (2, 1, 1), (2, 2, 2), (8, 7, 1), (8, 8, 2), (4, 15, 4), (1, 3, 4)],
)
def test_embedded_engines_and_the_learner_share_gpus_where_there_are_too_few(
    num_gpus: int, num_engines: int, per_gpu: int
) -> None:
    placed = place(scenario({"count": num_engines}), nodes(num_gpus))
    assert set(places(placed)) == {LEARNER, *map(engine_name, range(num_engines))}
    assert max(len(block.members) for block in placed.blocks) == per_gpu
    assert sum(block.num_gpus for block in placed.blocks) <= num_gpus


def test_who_names_its_device_or_needs_none_is_given_none() -> None:
    assert place(scenario({"device": "cuda:1"}, learner={"device": "cpu"}), nodes(8)).blocks == ()
    assert place(scenario({"device": "cpu"}), nodes(8)).blocks == (Block((LEARNER,), 1, ("node0",)),)
    running = {"backend": "sglang", "addresses": ["http://a:1"]}
    assert place(scenario(running), nodes(8)).blocks == (Block((LEARNER,), 1, ("node0",)),)


def test_a_cluster_without_gpus_is_enough_for_those_that_take_them_where_there_are_some() -> None:
    assert place(scenario({}), nodes(0)).blocks == ()
    assert place(scenario(sglang(1, 2)), nodes()).blocks == ()
    with pytest.raises(UserFault, match=r"No GPU is free in the cluster.*set engines.device=cpu"):
        place(scenario({"device": "cuda"}), nodes(0))


def test_an_engine_lies_on_one_node_when_it_fits_there() -> None:
    placed = places(place(scenario(sglang(3, 4)), nodes(6, 8, 4)))
    assert [placed[engine_name(index)].gpus_per_node for index in range(3)] == [4, 4, 4]
    assert placed["engine/0"].node_ids == ("node2",)  # the one with the least room
    assert len({placed[engine_name(index)].node_ids for index in range(3)}) == 3


def test_an_engine_that_fits_on_no_node_gets_as_much_of_each_of_as_few_as_possible() -> None:
    placed = places(place(scenario(sglang(1, 8)), nodes(2, 5, 4)))
    assert placed["engine/0"] == Block(("engine/0",), 4, ("node2", "node1"))
    assert placed[LEARNER].node_ids == ("node1",)


def test_an_engine_that_is_to_span_nodes_does_also_when_it_would_fit_on_one() -> None:
    placed = places(place(scenario(sglang(1, 4, nnodes=2)), nodes(8, 8)))
    assert placed["engine/0"] == Block(("engine/0",), 2, ("node0", "node1"))


@pytest.mark.parametrize(("how", "used"), [("auto", {0}), ("pack", {0}), ("spread", {0, 1})])
def test_pack_takes_few_nodes_and_spread_takes_many(how: str, used: set[int]) -> None:
    placed = places(place(scenario({"placement": how, **sglang(2, 2)}, learner={"device": "cpu"}), nodes(4, 4)))
    assert {node for block in placed.values() for node in block.node_ids} == {f"node{index}" for index in used}


def test_large_blocks_are_placed_first() -> None:
    engines = {**sglang(3, 1), "more": [sglang(1, 4)]}
    placed = places(place(scenario(engines), nodes(4, 4)))
    assert placed["engine/3"].gpus_per_node == 4


def test_a_learner_that_fits_on_no_node_has_as_many_ranks_on_each_of_as_few_as_possible() -> None:
    def placed(num_ranks: int, *num_gpus: int, **learner: object) -> Block:
        made = scenario({"device": "cpu"}, learner={"num_ranks": num_ranks, **learner})
        return places(place(made, nodes(*num_gpus)))[LEARNER]

    assert placed(8, 8, 8) == Block((LEARNER,), 8, ("node0",))
    assert placed(16, 8, 8) == Block((LEARNER,), 8, ("node0", "node1"))
    assert placed(16, 8, 7, 6, 5) == Block((LEARNER,), 4, ("node3", "node2", "node1", "node0"))
    assert placed(64, *[8] * 9).node_ids == tuple(f"node{index}" for index in range(8))
    with pytest.raises(UserFault, match=r"learner asked for 6 GPUs\. 7 are free, 5 \+ 2 .*learner.num_ranks=5"):
        placed(6, 5, 2)


@pytest.mark.parametrize("keys", [{"backend": "megatron", "megatron": {"tensor_parallel": 8}}, {"tensor_parallel": 8}])
def test_the_ranks_of_a_tensor_parallel_group_are_on_one_node(keys: dict[str, Any]) -> None:
    learner = {"num_ranks": 16, **keys}
    made = scenario({"device": "cpu"}, learner=learner)
    assert place(made, nodes(8, 8)).blocks == (Block((LEARNER,), 8, ("node0", "node1")),)
    with pytest.raises(UserFault, match=r"all of a tensor-parallel group are on one; .*learner.num_ranks=8"):
        place(made, nodes(8, 4, 4))


def test_a_colocated_learner_stays_on_the_first_node_of_its_engine() -> None:
    together = scenario({"placement": "colocate", **sglang(1, 4, nnodes=2)}, learner={"num_ranks": 2})
    assert place(together, nodes(2, 2)).blocks == (Block(("engine/0", LEARNER), 2, ("node0", "node1")),)
    assert not has_nodes_of_its_own(together)
    assert has_nodes_of_its_own(scenario({"placement": "colocate", "device": "cpu"}, learner={"num_ranks": 2}))
    with pytest.raises(UserFault, match="the GPUs of engine/0, which has 2 on a node, and each of 4 ranks"):
        place(scenario({"placement": "colocate", **sglang(1, 4, nnodes=2)}, learner={"num_ranks": 4}), nodes(2, 2))


def test_a_colocated_learner_is_on_the_gpus_of_the_first_engine_that_has_some() -> None:
    together = scenario({"placement": "colocate", **sglang(2, 2)}, learner={"num_ranks": 2})
    placed = place(together, nodes(4))
    assert placed.blocks[0] == Block(("engine/0", LEARNER), 2, ("node0",))
    assert placed.blocks[1] == Block(("engine/1",), 2, ("node0",))
    assert colocated(together) == {"engine/0"}
    second = scenario({"placement": "colocate", "device": "cpu", "more": [{"backend": "torch"}]})
    assert place(second, nodes(1)).blocks == (Block(("engine/1", LEARNER), 1, ("node0",)),)
    assert colocated(second) == {"engine/1"}
    assert colocated(scenario({})) == set()


def test_the_ranks_of_a_node_lie_over_all_of_its_engines() -> None:
    """Eight ranks, four engines of two: each GPU has one rank and one part of an engine."""
    together = scenario({"placement": "colocate", **sglang(4, 2)}, learner={"num_ranks": 8})
    placed = place(together, nodes(4, 8))
    names = tuple(engine_name(index) for index in range(4))
    assert placed.blocks == (Block((*names, LEARNER), 8, ("node1",), (2, 2, 2, 2)),)
    assert colocated(together) == set(names)
    assert [range(8)[placed.gpus_of(name)] for name in names] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert range(8)[placed.gpus_of(LEARNER)] == range(8)
    assert num_gpus_asked(together) == 8
    with pytest.raises(UserFault, match=r"The learner and engine/0 … engine/3 share 8 GPUs, all of one node"):
        place(together, nodes(4, 4))


def test_engines_beyond_the_ranks_have_gpus_of_their_own() -> None:
    together = scenario({"placement": "colocate", **sglang(3, 2)}, learner={"num_ranks": 3})
    placed = places(place(together, nodes(4, 2)))
    assert placed["engine/1"] == placed[LEARNER] == Block(("engine/0", "engine/1", LEARNER), 4, ("node0",), (2, 2))
    assert placed["engine/2"] == Block(("engine/2",), 2, ("node1",))
    assert colocated(together) == {"engine/0", "engine/1"}


@pytest.mark.parametrize("backend", ["sglang", "torch"])
def test_engines_that_are_lent_the_learners_gpus_have_none_of_their_own(backend: str) -> None:
    """Two engines with GPUs, and two on the first GPUs of a learner with four ranks, one behind the other."""
    size = 2 if backend == "sglang" else 1
    options = {"sglang": {"tp_size": 2}} if backend == "sglang" else {}
    engines = {"backend": backend, "count": 2, "max": 4, "lent": 2, "device": "cuda", **options}
    made = scenario(engines, learner={"num_ranks": 4, "device": "cuda"})
    placed = place(made, nodes(4, 2 * size))
    together = Block(("engine/2", "engine/3", LEARNER), 4, ("node0",), (size, size))
    assert placed.blocks[0] == together
    own = {name: block.num_gpus for name, block in places(placed).items() if block != together}
    assert own == {"engine/0": size, "engine/1": size}
    seats = [range(4)[placed.gpus_of(name)] for name in together.members]
    assert seats == [range(size), range(size, 2 * size), range(4)]
    assert num_gpus_asked(made) == 4 + 2 * size
    assert not has_nodes_of_its_own(made)
    with pytest.raises(UserFault, match=r"The learner and engine/2 … engine/3 share 4 GPUs, all of one node"):
        place(made, nodes(2, 2, 2, 2))


def test_a_lent_engine_has_the_one_gpu_of_the_learner_where_there_are_any() -> None:
    made = scenario({"count": 1, "max": 2, "lent": 1})
    assert places(place(made, nodes(2)))["engine/1"] == Block(("engine/1", LEARNER), 1, ("node0",), (1,))
    assert place(made, nodes(0)).blocks == ()
    on_cpu = scenario({"count": 1, "max": 2, "lent": 1, "device": "cpu"}, learner={"device": "cpu"})
    assert place(on_cpu, nodes(2)).blocks == ()


def test_where_nobody_gets_a_gpu_the_turns_are_those_that_there_would_be() -> None:
    for device in ("cuda", "cpu"):
        made = scenario({"placement": "colocate", "device": device, **sglang(4, 2)}, learner={"num_ranks": 4})
        assert colocated(made) == {"engine/0", "engine/1"}


@pytest.mark.parametrize(
    ("engines", "num_gpus", "said"),
    [
        (
            sglang(4, 2),
            (8,),
            "engines: learner asked for 1 GPU; engine/0 … engine/3 asked for 2 GPUs each. 8 are free, on one node. "
            "The nearest that fits is engines.count=3",
        ),
        (
            {**sglang(1, 1), "more": [sglang(2, 4)]},
            (4, 4),
            "engines.more[0]: learner asked for 1 GPU; engine/0 asked for 1 GPU; engine/1 … engine/2 asked for 4 GPUs "
            "each. 8 are free, 4 + 4 on 2 nodes. The nearest that fits is engines.more[0].count=1",
        ),
        (
            sglang(2, 8),
            (4, 3),
            "engines: learner asked for 1 GPU; engine/0 … engine/1 asked for 8 GPUs each. 7 are free, 4 + 3 on 2 "
            "nodes. The largest engine that fits beside the others has 4 GPUs: reduce tp_size or pp_size",
        ),
        (
            sglang(1, 4, nnodes=2),
            (8,),
            "engines: learner asked for 1 GPU; engine/0 asked for 4 GPUs over 2 nodes. 8 are free, on one node. It "
            "fits without engines.sglang.nnodes",
        ),
        (
            sglang(1, 1),
            (1,),
            "engines: learner asked for 1 GPU; engine/0 asked for 1 GPU. 1 is free, on one node. Not one engine fits "
            "beside the others: add GPUs, or take something off them with device: cpu",
        ),
    ],
)
def test_what_the_cluster_cannot_give_is_refused_with_the_nearest_that_it_can(
    engines: dict[str, Any], num_gpus: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UserFault) as refused:
        place(scenario(engines), nodes(*num_gpus))
    assert str(refused.value) == said


def test_a_dry_run_says_what_will_be_asked_for() -> None:
    engines = {**sglang(2, 8, nnodes=2), "more": [{"backend": "sglang", "addresses": ["http://a:1"]}]}
    text = placement_text(resolve(scenario(engines, staleness={"policy": "sync"})))
    assert "sglang, 64 slots each, 8 GPUs each over 2 nodes" in text
    assert "sglang, 64 slots each, running already" in text
    assert "; asks for 17 GPUs where there are any (placement auto)" in text


# --- engines that join a run on a cluster -----------------------------------------------------------------------

CLUSTER = {"ray_address": "auto"}


def joining(engines: dict[str, Any], *, count: int = 1, most: int = 3, **blocks: object) -> Scenario:
    made = {"runtime": CLUSTER, **blocks}
    return scenario({"device": "cuda", **engines, "count": count, "max": most}, **made)


def test_at_the_start_engines_that_may_join_ask_for_nothing() -> None:
    made = joining(sglang(1, 2))
    placed = place(made, nodes(3), at_start=True)
    assert set(places(placed)) == {LEARNER, "engine/0"}
    assert [wish.members for wish in placed.on_demand] == [("engine/0",), ("engine/1",), ("engine/2",)]
    assert {wish.size.num_gpus for wish in placed.on_demand} == {2}
    assert (num_gpus_asked(made, at_start=True), num_gpus_asked(made)) == (3, 7)
    with pytest.raises(UserFault, match=r"engine/0 … engine/2 asked for 2 GPUs each. 3 are free"):
        place(made, nodes(3))  # what a job that has to bring all of its nodes is planned with


@pytest.mark.parametrize("where", [{"runtime": {}}, {"gpu_timeout_s": None}])
def test_on_one_machine_and_where_the_scenario_says_so_all_are_reserved(where: dict[str, Any]) -> None:
    blocks = {"runtime": where["runtime"]} if "runtime" in where else {}
    made = joining({**sglang(1, 2), **({} if blocks else where)}, **blocks)
    placed = place(made, nodes(7), at_start=True)
    assert (set(places(placed)), placed.on_demand) == ({LEARNER, *map(engine_name, range(3))}, ())
    assert num_gpus_asked(made, at_start=True) == 7


def test_who_shares_a_gpu_or_is_lent_the_learners_keeps_it() -> None:
    placed = place(joining({"backend": "torch"}), nodes(1), at_start=True)
    assert places(placed)["engine/0"].members == (LEARNER, "engine/0")
    assert [wish.members for wish in placed.on_demand] == [("engine/1",), ("engine/2",)]
    placed = place(joining({"backend": "torch", "lent": 1}, learner={"device": "cuda"}), nodes(2), at_start=True)
    assert places(placed)["engine/2"].members == ("engine/2", LEARNER)
    assert [wish.members for wish in placed.on_demand] == [("engine/0",), ("engine/1",)]


def test_where_nobody_gets_a_gpu_nobody_who_joins_asks_for_one() -> None:
    assert place(joining({"device": "auto"}), nodes(0), at_start=True).on_demand == ()
    on_cpu = joining({"device": "cpu"}, learner={"device": "cpu"})
    assert place(on_cpu, nodes(4), at_start=True).on_demand == ()


@pytest.mark.parametrize(
    ("at_start", "free", "asked"),
    [
        ((1, 8), (0, 8), (8, 1)),  # as it is free, on one node
        ((1, 8), (4, 4), (4, 2)),  # or on two
        ((1, 8), (0, 0), (8, 1)),  # as the first one has it
        ((1, 4, 4), (0, 2), (4, 2)),  # which lies on two nodes, so that these have four GPUs each
    ],
)
def test_who_joins_asks_for_what_is_there_or_for_nodes_like_those_that_are(
    at_start: tuple[int, ...], free: tuple[int, ...], asked: tuple[int, int]
) -> None:
    placed = place(joining(sglang(1, 8)), nodes(*at_start), at_start=True)
    wish = placed.on_demand[1]
    per_node, num_nodes = asked
    assert late_block(wish, nodes(*free), placed) == Block(wish.members, per_node, (ANY_NODE,) * num_nodes)


def test_a_dry_run_says_what_is_asked_for_later() -> None:
    text = placement_text(resolve(joining(sglang(1, 2))))
    assert "1 at least and 3 at most, with GPUs while they are there" in text
    assert "; asks for 3 GPUs, and for more as engines join, 7 at most (placement auto)" in text
    alone = placement_text(resolve(joining(sglang(1, 2), runtime={})))
    assert "1 at least and 3 at most, for which GPUs are reserved" in alone
    assert "; asks for 7 GPUs (placement auto)" in alone
