"""Why a cluster cannot give what is asked of it, and what would fit. Pure."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from penstock.backends.engines.spec import EngineSize
from penstock.messages.names import LEARNER
from penstock.messages.texts import counted
from penstock.runtime.run.gpu_needs import learner_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.learners.options import LearnerOptions
    from penstock.runtime.run.gpu_needs import Need, NodeGpus, Wish
    from penstock.runtime.scenario import Scenario


def refusal_of(
    scenario: Scenario,
    needs: list[Need],
    nodes: Sequence[NodeGpus],
    shared: Wish | None,
    has_place: Callable[[list[Need]], bool],
) -> str:
    """What was asked, what there is, and what would fit.

    Args:
        scenario: that asks.
        needs: of everybody.
        nodes: of the cluster.
        shared: what the learner and the engines that take turns with it ask for together, where there are such.
        has_place: whether these needs would be met.
    """
    largest = max(needs, key=lambda need: (not need.may_share, need.size.num_gpus, not need.is_optional))
    asked = "; ".join(_asked(need) for need in needs)
    there = _there(nodes)
    if shared is not None and shared.engine_gpus:
        *engines, _ = shared.members
        there += f". The learner and {few(engines)} share {shared.size.num_gpus} GPUs, all of one node"
    return f"{largest.key}: {asked}. {there}. {_nearest(scenario, needs, largest, nodes, has_place)}"


def few(names: Sequence[str]) -> str:
    """The names, or where there are several the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _asked(need: Need) -> str:
    who = few(need.names)
    each = "" if len(need.names) == 1 else " each"
    gpus = counted(need.size.num_gpus, "GPU")
    over = f" over {need.size.node_counts[0]} nodes" if need.size.node_counts[0] > 1 else ""
    return f"{who} asked for {gpus}{each}{over}"


def _there(nodes: Sequence[NodeGpus]) -> str:
    counts = [node.num_gpus for node in nodes if node.num_gpus]
    if not counts:
        return "No GPU is free in the cluster"
    text = " + ".join(map(str, counts))
    return f"{sum(counts)} {'is' if sum(counts) == 1 else 'are'} free, " + (
        "on one node" if len(counts) == 1 else f"{text} on {len(counts)} nodes"
    )


def _nearest(
    scenario: Scenario,
    needs: list[Need],
    largest: Need,
    nodes: Sequence[NodeGpus],
    has_place: Callable[[list[Need]], bool],
) -> str:
    if not any(node.num_gpus for node in nodes):
        return f"Give the cluster GPUs, or set {largest.key}.device=cpu where that is enough"

    def fits(count: int, size: EngineSize) -> bool:
        smaller = largest._replace(names=largest.names[:count], size=size)
        return has_place([smaller if need is largest else need for need in needs])

    count = bisect_right(range(1, len(largest.names)), 0, key=lambda count: 0 if fits(count, largest.size) else 1)
    if count:
        return f"The nearest that fits is {largest.key}.count={count}"
    if largest.size.node_counts[0] > 1 and fits(len(largest.names), EngineSize(largest.size.num_gpus, (1,))):
        return f"It fits without {largest.key}.sglang.nnodes"
    if largest.names == (LEARNER,):
        return _fewer_ranks(scenario.learner, fits)
    for num_gpus in range(largest.size.num_gpus - 1, 0, -1):
        if largest.size.num_gpus % num_gpus == 0 and fits(1, EngineSize(num_gpus, (1,))):
            return (
                f"The largest engine that fits beside the others has {counted(num_gpus, 'GPU')}: "
                f"reduce tp_size or pp_size"
            )
    return "Not one engine fits beside the others: add GPUs, or take something off them with device: cpu"


def _fewer_ranks(learner: LearnerOptions, fits: Callable[[int, EngineSize], bool]) -> str:
    for num_ranks in range(learner.num_ranks - 1, 0, -1):
        if fits(1, learner_size(learner, num_ranks)):
            return (
                "Every node gets equally many ranks of a learner, and all of a tensor-parallel group are on one; "
                f"the most that fit are learner.num_ranks={num_ranks}"
            )
    return "No rank of the learner fits beside the others: add GPUs, or set learner.device=cpu where that is enough"
