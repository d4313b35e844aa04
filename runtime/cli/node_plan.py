"""Who would get which GPUs of which nodes, before a cluster is there: the fewest nodes of a size that are enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.served.sglang.environment import num_cuda_gpus
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER
from penstock.messages.texts import counted
from penstock.runtime.cli.tables import aligned
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import Placement, needs_of, num_gpus_asked, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.run.placement import Block
    from penstock.runtime.scenario import Scenario

DEFAULT_GPUS_PER_NODE: Final = 8
MAX_NODES: Final = 1024


class NodePlan(NamedTuple):
    """A placement on nodes that are alike."""

    placement: Placement
    num_nodes: int
    gpus_per_node: int
    refusal: str = ""
    """Why there is none."""

    def node_of(self, rank: int) -> int | None:
        """The node of a rank of the learner, counted from 0; None where it gets no GPU."""
        block = self.placement.block_of(LEARNER)
        return None if block is None else int(block.node_ids[rank // block.gpus_per_node])


def plan_nodes(scenario: Scenario, gpus_per_node: int | None = None) -> NodePlan | None:
    """The placement on as few nodes as are enough; None where nobody needs a GPU.

    Args:
        scenario: resolved.
        gpus_per_node: that are free; None: those of this machine where it runs here and has some, or eight.
    """
    on_cluster = scenario.runtime.ray_address is not None
    here = 0 if on_cluster else num_cuda_gpus()
    needs = needs_of(scenario)
    if not needs or (all(need.is_optional for need in needs) and not here and gpus_per_node is None):
        return None
    per_node = gpus_per_node or here or DEFAULT_GPUS_PER_NODE
    fewest = max(1, -(-num_gpus_asked(scenario) // per_node) if on_cluster else 1)
    refusal = ""
    # A block leaves at most a part of each of its nodes free, so twice as many are enough if any number is.
    for num_nodes in range(fewest, min(2 * fewest + 1, MAX_NODES) + 1) if on_cluster else (1,):
        nodes = [NodeGpus(str(node), per_node) for node in range(num_nodes)]
        try:
            return NodePlan(place(scenario, nodes), num_nodes, per_node)
        except UserFault as error:
            refusal = refusal or str(error)
    return NodePlan(Placement(), fewest, per_node, refusal)


def node_text(plan: NodePlan) -> list[str]:
    """A heading, and a line for each node."""
    nodes = (
        f"{plan.num_nodes} of {counted(plan.gpus_per_node, 'GPU')}{' each' * (plan.num_nodes > 1)} (--gpus-per-node)"
    )
    if plan.refusal:
        return [f"nodes: {nodes} have no place for all", f"  {plan.refusal}"]
    rows = [(f"  node {node}", _on_node(plan, str(node))) for node in range(plan.num_nodes)]
    return [f"nodes: {nodes}", *aligned(rows)]


def _on_node(plan: NodePlan, node: str) -> str:
    """Who is on it, those that have equally many of its GPUs together."""
    ranks, others, free = list[str](), dict[int, list[str]](), plan.gpus_per_node
    for block in plan.placement.blocks:
        if node not in block.node_ids:
            continue
        free -= block.gpus_per_node
        guests = [name for name in block.members if name != LEARNER]
        if LEARNER in block.members:
            ours = [_ranks(plan.placement, block, node), *([_few(guests)] if guests else [])]
            gpus = f", {_gpus(block.gpus_per_node)}" if guests or ours == [LEARNER] else ""
            ranks.append(" and ".join(ours) + gpus + " between them" * bool(guests))
        else:
            others.setdefault(block.gpus_per_node, []).append(" and ".join(guests))
    texts = ranks + [f"{_few(names)}, {_gpus(count)}{' each' * (len(names) > 1)}" for count, names in others.items()]
    return "; ".join([*texts, f"{_gpus(free)} free"] if free else texts)


def _ranks(placement: Placement, block: Block, node: str) -> str:
    if placement.num_learner_ranks == 1:
        return LEARNER
    first = block.node_ids.index(node) * block.gpus_per_node
    last = min(first + block.gpus_per_node, placement.num_learner_ranks) - 1
    return f"{LEARNER} ranks {first}–{last}" if last > first else f"{LEARNER} rank {first}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"


def _gpus(count: int) -> str:
    return counted(count, "GPU")
