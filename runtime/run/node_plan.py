"""Who would get which GPUs of which nodes, before a cluster is there: the fewest nodes of a size that are enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.served.sglang.environment import num_cuda_gpus
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import Placement, needs_of, num_gpus_asked, place

if TYPE_CHECKING:
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
