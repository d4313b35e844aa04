"""A plan of nodes in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.names import LEARNER
from penstock.messages.texts import counted
from penstock.runtime.cli.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.run.node_plan import NodePlan
    from penstock.runtime.run.placement import Block, Placement


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
