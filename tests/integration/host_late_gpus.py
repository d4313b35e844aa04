"""Engines whose GPUs come with later nodes: ``python host_late_gpus.py``; fails where anything is wrong.

A process of its own: a process has one Ray, and the tests have theirs.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host_growing import growing

from penstock.backends.engines.spec import EngineSize
from penstock.runtime.hosts.ray.cluster import RayCluster, prepare_environment
from penstock.runtime.hosts.ray.groups import PlacementGroups, Seat
from penstock.runtime.run.gpu_needs import Wish
from penstock.runtime.run.placement import Block, Placement

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 60.0
SIZE = EngineSize(2, (1, 2))


class Engine:
    """In the place of an EngineWorker."""

    def place(self) -> tuple[list[str], str]:
        import ray

        untyped: Any = ray
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return devices, str(untyped.get_runtime_context().get_node_id())


def wait_for(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


def main() -> None:
    with growing(num_gpus=2) as nodes:
        prepare_environment(nodes.address)
        cluster = RayCluster(address=nodes.address, temp_folder=Path(tempfile.gettempdir()))
        import ray as untyped_ray

        ray: Any = untyped_ray
        first = Block(("engine/0",), 2, (cluster.node_id,))
        names = [f"engine/{index}" for index in range(4)]
        placement = Placement((first,), on_demand=tuple(Wish((name,), SIZE) for name in names))
        groups = PlacementGroups(ray, placement)
        actor_class: Any = ray.remote(Engine)

        def started(seat: Seat | None) -> Any:  # noqa: ANN401 - an actor's handle
            assert seat is not None
            assert seat.holder is None
            options = {"num_cpus": 0, "num_gpus": seat.num_gpus, "scheduling_strategy": seat.strategy}
            return actor_class.options(**options).remote()

        def place_of(engine: Any) -> tuple[list[str], str]:  # noqa: ANN401
            devices, node_id = ray.get(engine.place.remote(), timeout=DEADLINE_S)
            return list(devices), str(node_id)

        groups.reserve("engine/0", cluster.nodes)
        assert groups.lacks("engine/0") == "", "it has what was reserved at the start"
        groups.reserve("learner", cluster.nodes)
        assert groups.lacks("learner") == "", "who gets no GPU waits for none"

        # One that waits, a node that comes, and GPUs that are the engine's own.
        groups.reserve("engine/1", cluster.nodes)
        assert groups.lacks("engine/1") == "a node with 2 GPUs"
        asked = pending_bundles(nodes.address)
        assert asked == [[{"GPU": 2.0}]], f"what an autoscaler reads: {asked}"
        second = nodes.add(4)
        wait_for(lambda: not groups.lacks("engine/1"))
        engine = started(groups.seat_of("engine/1"))
        devices, node_id = place_of(engine)
        assert (len(set(devices)), node_id) == (2, second)

        # Room that is there is taken without a wait for a node, also beside one that is there.
        groups.reserve("engine/2", cluster.nodes)
        wait_for(lambda: not groups.lacks("engine/2"))
        other_devices, other_node = place_of(started(groups.seat_of("engine/2")))
        assert (other_node, set(other_devices) & set(devices)) == (second, set())

        # Who leaves gives its own back, and nobody else's; who comes back meanwhile gets others.
        group = groups.part_with("engine/1")
        assert group is not None
        groups.reserve("engine/1", cluster.nodes)
        assert groups.lacks("engine/1") == "a node with 2 GPUs"
        groups.remove(group)
        wait_for(lambda: not groups.lacks("engine/1"))
        assert place_of(started(groups.seat_of("engine/1"))) == (devices, second)

        # One that is given up asks for nothing any more.
        groups.reserve("engine/3", cluster.nodes)
        assert groups.lacks("engine/3") == "a node with 2 GPUs"
        groups.remove(groups.part_with("engine/3"))
        wait_for(lambda: not pending_bundles(nodes.address))

        # Where two nodes have room for the halves of one, it lies over these.
        halves = {nodes.add(1), nodes.add(1)}
        wait_for(lambda: {node.node_id for node in cluster.nodes() if node.num_gpus} == halves)
        groups.reserve("engine/3", cluster.nodes)
        wait_for(lambda: not groups.lacks("engine/3"))
        assert set(groups.further_nodes_of("engine/3")) == halves
        devices, node_id = place_of(started(groups.seat_of("engine/3")))
        assert len(devices) == 1
        assert node_id in halves
        groups.release()
        wait_for(lambda: nodes.free() == {cluster.node_id: 2, second: 4, **dict.fromkeys(halves, 1)})
        cluster.stop(is_orderly=True)
    print("all is well")


def pending_bundles(address: str) -> list[list[dict[str, float]]]:
    """The groups that Ray has no room for, as an autoscaler is told of them."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    status: Any = get_cluster_status(address)
    return [
        [dict(each.bundle) for each in demand.bundles_by_count for _ in range(each.count)]
        for demand in status.resource_demands.placement_group_demand
    ]


if __name__ == "__main__":
    main()
