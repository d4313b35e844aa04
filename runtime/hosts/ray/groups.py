"""Ray's placement groups of a run, one for each block of GPUs.

Invariants:

* A block is reserved as a whole before any actor starts, on the very nodes that the placement names. Until the run ends
  nobody else gets its GPUs, also not while an engine is restarted.
* An engine that joins later asks for a block of its own then, wherever there is or will be room, and nothing is started
  before Ray has it. When the engine leaves for good, Ray gets the block back, and with it, maybe, an idle node.
* A block whose node is lost is reserved anew, wherever there is room.
* With one user a block is given to him: Ray sets his ``CUDA_VISIBLE_DEVICES``. One GPU with several users is split. Of
  more GPUs with several users Ray can give away only the whole, so a process that does nothing else holds them, and the
  users are told its devices.

| waits for | who ends it |
|---|---|
| the reservation | Ray, within ``RESERVE_TIMEOUT_S``; then the run is refused |
| that of an engine that joins | Ray; else ``engines.gpu_timeout_s`` (``gpu_waits.py``), and the engine is given up |
| the devices that a holder has | the holder's start; the start deadline of who waits |
"""

# Ray's own types are mostly unknown to a type checker; everything that leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.hosts.processes.boot import VISIBLE_DEVICES
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import late_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.runtime.run.placement import Block, Placement

RESERVE_TIMEOUT_S: Final = 30.0
NODE_LABEL: Final = "ray.io/node-id"


class Seat(NamedTuple):
    """Where Ray is to start an actor."""

    strategy: Any
    """Ray's scheduling strategy for the process."""
    num_gpus: float
    holder: Any = None
    """Who knows the devices that the actor may see; None when Ray sets them itself."""
    devices: slice | None = None
    """Which of them; None means all."""


class GpuHolder:
    """Holds GPUs that several processes use; a small Ray actor."""

    def devices(self) -> str:
        """What Ray has given it, as in ``CUDA_VISIBLE_DEVICES``."""
        return os.environ.get(VISIBLE_DEVICES, "")


def gpus_of_nodes(ray: Any, own_node_id: str) -> list[NodeGpus]:  # noqa: ANN401 - the module
    """Free GPUs of every living node, this one first."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    alive = sorted(
        (str(node["NodeID"]) for node in ray.nodes() if node["Alive"]), key=lambda node: (node != own_node_id, node)
    )
    return [NodeGpus(node, int(free.get(node, {}).get("GPU", 0.0))) for node in alive]


class PlacementGroups:
    """The reservations of one run."""

    def __init__(self, ray: Any, placement: Placement) -> None:  # noqa: ANN401 - the module
        """Reserves everything.

        Args:
            ray: Ray's module, connected.
            placement: what to reserve.

        Raises:
            UserFault: somebody else was faster.
        """
        self._ray = ray
        self._placement = placement
        self._groups: dict[Block, Any] = {}
        self._holders: dict[Block, Any] = {}
        self._blocks = {name: block for block in placement.blocks for name in block.members}
        self._wishes = {wish.members[0]: wish for wish in placement.on_demand}
        self._asked: set[Any] = set()
        """Groups that Ray was asked for without a wait."""
        self._granted: set[Any] = set()
        """Of these the ones that it has reserved. Grows on a thread of Ray's."""
        for block in placement.blocks:
            self._groups[block] = _reserve(block, on=block.node_ids)
        for block, group in self._groups.items():
            if not group.wait(RESERVE_TIMEOUT_S):
                self.release()
                raise UserFault(
                    f"{block.num_gpus} GPUs for {' and '.join(block.members)} were free a moment ago, and Ray could "
                    f"not reserve them within {RESERVE_TIMEOUT_S:g} s: another job has taken them; try again later"
                )
        for block in placement.blocks:
            self._hold(block)

    def reserve(self, name: str, nodes: Callable[[], Sequence[NodeGpus]]) -> None:
        """Ask for the GPUs of an engine that joins, or whose node is gone; returns at once. Nothing for anybody else.

        Args:
            name: of an actor that is to be started.
            nodes: says what is free now.
        """
        wish = self._wishes.get(name)
        if wish is None:
            return
        block = self._blocks.get(name)
        if block is not None and not self._has_lost_a_node(block):
            return
        if (gone := self.part_with(name)) is not None:
            self.remove(gone)
        block = late_block(wish, nodes(), self._placement)
        group = self._groups[block] = _reserve(block, on=None)
        self._blocks[name] = block
        self._asked.add(group)
        group.ready().future().add_done_callback(partial(self._on_ready, group))

    def _on_ready(self, group: Any, future: Any) -> None:  # noqa: ANN401 - on a thread of Ray's
        if future.exception() is None:  # else it was removed
            self._granted.add(group)

    def lacks(self, name: str) -> str:
        """What has to come before an actor that was asked for can be started; empty where nothing has to."""
        block = self._blocks.get(name)
        group = None if block is None else self._groups[block]
        if block is None or group not in self._asked or group in self._granted:
            return ""
        gpus, num_nodes = counted(block.gpus_per_node, "GPU"), len(block.node_ids)
        return f"a node with {gpus}" if num_nodes == 1 else f"{num_nodes} nodes with {gpus} each"

    def part_with(self, name: str) -> Any:  # noqa: ANN401 - a type of Ray's
        """Of an engine that nobody follows: its group, to be removed when nothing of the engine is left. None for who
        keeps it to the end of the run. If the engine joins again meanwhile, it gets another one."""
        if name not in self._wishes or (block := self._blocks.pop(name, None)) is None:
            return None
        group = self._groups.pop(block)
        self._asked.discard(group)
        self._granted.discard(group)
        return group

    def remove(self, group: Any) -> None:  # noqa: ANN401 - a type of Ray's
        """Give its GPUs back to Ray."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)

    def seat_of(self, name: str) -> Seat | None:
        """Where this actor belongs; None for who gets no GPU. A block whose node is gone is reserved anew."""
        block = self._blocks.get(name)
        if block is None:
            return None
        if self._has_lost_a_node(block):
            self._reserve_anew(block)
        strategy = _strategy(self._groups[block], 0)
        if block in self._holders:
            return Seat(strategy, 0.0, self._holders[block], self._placement.gpus_of(name))
        return Seat(strategy, block.gpus_per_node / len(block.members))

    def further_nodes_of(self, name: str) -> list[str]:
        """The nodes of an actor whose block lies over several."""
        from ray.util.placement_group import placement_group_table

        block = self._blocks.get(name)
        if block is None or len(block.node_ids) == 1:
            return []
        bundles: dict[int, str] = placement_group_table(self._groups[block])["bundles_to_node_id"]
        return list(filter(None, bundles.values()))

    def release(self) -> None:
        """Give everything back. Ray does so itself when the run's connection ends."""
        self._holders.clear()  # Ray ends an actor that nobody refers to
        for group in self._groups.values():
            self.remove(group)
        self._groups.clear()
        self._blocks.clear()

    def _hold(self, block: Block) -> None:
        if len(block.members) > 1 and block.gpus_per_node > 1:
            holder = self._ray.remote(GpuHolder)
            options = {"num_cpus": 0, "num_gpus": block.gpus_per_node, "max_restarts": -1}
            strategy = _strategy(self._groups[block], 0)
            self._holders[block] = holder.options(**options, scheduling_strategy=strategy).remote()

    def _has_lost_a_node(self, block: Block) -> bool:
        from ray.util.placement_group import placement_group_table

        state = placement_group_table(self._groups[block])["state"]
        return state not in ("CREATED", "PENDING", "PREPARED")

    def _reserve_anew(self, block: Block) -> None:
        self._holders.pop(block, None)
        self.remove(self._groups[block])
        self._groups[block] = _reserve(block, on=None)
        self._hold(block)


def _reserve(block: Block, on: tuple[str, ...] | None) -> Any:  # noqa: ANN401 - a type of Ray's
    """Ask for the block, on these nodes or, with None, on any; it is there when Ray says so."""
    from ray.util.placement_group import placement_group

    labels: Any = None if on is None else [{NODE_LABEL: node_id} for node_id in on]
    return placement_group(
        [{"GPU": float(block.gpus_per_node)} for _ in block.node_ids],
        strategy="STRICT_PACK" if len(block.node_ids) == 1 else "STRICT_SPREAD",
        bundle_label_selector=labels,
    )


def _strategy(group: Any, bundle: int) -> Any:  # noqa: ANN401 - types of Ray's
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
