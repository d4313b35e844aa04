"""Which GPUs of which nodes each actor gets. Pure.

What is placed is a *block*: GPUs that belong together, on one node or an equal number on each of several, and the
actors that use them. By default each actor has a block of its own (disaggregated). Two share one in two cases: with
``engines.placement: colocate`` the learner is put on the GPUs of the first engine, and embedded engines and the learner
share GPUs, in equal parts, where there are fewer of them than takers.

Invariants:

* A block lies on one node whenever one has room for it, otherwise on as few as its engine, or the learner, can be
  divided over.
* Larger blocks are placed first. ``auto`` and ``pack`` put each on the node with the least room that suffices,
  ``spread`` on the one with the most.
* What the cluster cannot give is refused, never made smaller; only ``auto`` devices do without, all together, in a
  cluster that has no GPU at all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.options import engine_groups, num_engines
from penstock.backends.engines.spec import ENGINES, ONE_GPU, EngineSize, are_modelled
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, engine_name, is_engine, reward_model_name, teacher_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.backends.engines.spec import EngineBlock
    from penstock.backends.learners.options import LearnerOptions
    from penstock.runtime.scenario import Scenario

FROM_RAY: Final = ("auto", "cuda")
"""Devices that Ray assigns. ``cuda:1`` is the user's own choice, ``cpu`` needs none."""


class NodeGpus(NamedTuple):
    """One node of the cluster."""

    node_id: str
    num_gpus: int
    """GPUs of the node that nobody else has taken."""


class Need(NamedTuple):
    """Actors that are alike, and the GPUs that each of them asks for."""

    names: tuple[str, ...]
    size: EngineSize
    key: str
    """Of the block of the scenario that they come from."""
    may_share: bool
    """Whether several may be put on one GPU where there are not enough: true of what runs inside our own process."""
    is_optional: bool
    """Whether they run without where the cluster has no GPU at all."""


class Block(NamedTuple):
    """GPUs that belong together, and who uses them."""

    members: tuple[str, ...]
    gpus_per_node: int
    node_ids: tuple[str, ...]
    """The first one is where its members run."""

    @property
    def num_gpus(self) -> int:
        """On all of its nodes."""
        return self.gpus_per_node * len(self.node_ids)


class Placement(NamedTuple):
    """Who gets which GPUs; who is in no block gets none."""

    blocks: tuple[Block, ...] = ()
    num_learner_ranks: int = 1
    """So many of its block's GPUs the learner uses."""

    def block_of(self, name: str) -> Block | None:
        """The block that this actor uses."""
        return next((block for block in self.blocks if name in block.members), None)


def needs_of(scenario: Scenario) -> list[Need]:
    """Everybody who asks Ray for GPUs: the learner, then the engines, then the teachers and reward models.

    Raises:
        UserFault: the options of an engine give no number of GPUs.
    """
    learner, needs = scenario.learner, list[Need]()
    if not is_modelled(learner) and learner.device in FROM_RAY:
        size = learner_size(learner)
        is_optional = learner.device == "auto"
        may_share = learner.num_ranks == 1 and LEARNERS.spec(learner.backend).shares_gpu
        needs.append(Need((LEARNER,), size, "learner", may_share=may_share, is_optional=is_optional))
    if scenario.run.only == "learner":
        return needs
    first = 0
    for index, group in enumerate(engine_groups(scenario.engines)):
        names = tuple(engine_name(first + number) for number in range(group.count))
        first += group.count
        needs += _need(names, group, f"engines.more[{index - 1}]" if index else "engines")
    needs += _teachers(scenario)
    if (model := scenario.reward_model) is not None:
        needs += _need(tuple(map(reward_model_name, range(model.count))), model, "reward_model")
    return needs


def learner_size(options: LearnerOptions, num_ranks: int | None = None) -> EngineSize:
    """GPUs of the learner's ranks, and over how many nodes they can lie: an equal number on each, and of the ranks that
    share a matrix, which say much to each other, all on one.

    Args:
        options: of the learner.
        num_ranks: None: theirs.
    """
    num_ranks = num_ranks or options.num_ranks
    together = LEARNERS.spec(options.backend).together(options)
    counts = [count for count in range(2, num_ranks // together + 1) if num_ranks % (count * together) == 0]
    return EngineSize(num_ranks, (1, *counts))


def _teachers(scenario: Scenario) -> list[Need]:
    teacher = scenario.teacher
    if teacher is None:
        return []
    return _need(tuple(teacher_name(index) for index in range(teacher.count)), teacher, "teacher")


def _need(names: tuple[str, ...], options: EngineBlock, key: str) -> list[Need]:
    """Of engines that are alike; nothing where none of them takes a GPU from Ray."""
    spec = ENGINES.spec(options.backend)
    size = spec.size(options) if options.device in FROM_RAY else None
    if size is None:
        return []
    may_share = Capability.EMBEDDED in spec.capabilities
    return [Need(names, size, key, may_share=may_share, is_optional=options.device == "auto")]


def place(scenario: Scenario, nodes: Sequence[NodeGpus]) -> Placement:
    """A place for everybody who needs one. Of nodes that are equally good the earlier one is taken.

    Raises:
        UserFault: the cluster cannot give it, with what was asked, what there is, and what would fit; or the options of
            an engine give no number of GPUs.
    """
    needs = needs_of(scenario)
    if not any(node.num_gpus for node in nodes) and all(need.is_optional for need in needs):
        return Placement()
    how, num_ranks = scenario.engines.placement, scenario.learner.num_ranks
    blocks = _arrange(needs, nodes, how)
    if blocks is None:
        raise UserFault(_refusal(scenario, needs, nodes))
    placement = Placement(tuple(blocks), num_ranks)
    shared = placement.block_of(LEARNER)
    if shared is not None and len(shared.members) > 1 and shared.gpus_per_node < num_ranks:
        raise UserFault(
            f"learner.num_ranks: the learner is put on the GPUs of {shared.members[0]}, which has "
            f"{shared.gpus_per_node} on a node, and each of {num_ranks} ranks needs one of its own; set it to "
            f"{shared.gpus_per_node} or less, give the engine more GPUs, or take another engines.placement"
        )
    return placement


def has_nodes_of_its_own(scenario: Scenario) -> bool:
    """Whether the nodes of the learner's block are the learner's: an engine that it is put on may lie over several, and
    all ranks are on the first of them then."""
    return not (scenario.engines.placement == "colocate" and _can_share(needs_of(scenario)))


def colocated(scenario: Scenario) -> frozenset[str]:
    """The engines that take turns with the learner: the first of those that get GPUs, or of all where none gets any.
    Simulated ones all do, as if the learner were spread over their devices."""
    if scenario.engines.placement != "colocate" or scenario.run.only == "learner":
        return frozenset()
    if are_modelled(scenario.engines):
        return frozenset(engine_name(index) for index in range(num_engines(scenario.engines)))
    engines = [need.names[0] for need in needs_of(scenario) if is_engine(need.names[0])]
    return frozenset({engines[0] if engines else engine_name(0)})


class _Wish(NamedTuple):
    members: tuple[str, ...]
    size: EngineSize


def _can_share(needs: Sequence[Need]) -> bool:
    """Whether there is an engine that the learner can be put on."""
    return len(needs) > 1 and needs[0].names == (LEARNER,) and is_engine(needs[1].names[0])


def _arrange(needs: Sequence[Need], nodes: Sequence[NodeGpus], how: str) -> list[Block] | None:
    """First fit, largest first. That finds a place for all where sizes divide the nodes, as powers of two do."""
    free = {node.node_id: node.num_gpus for node in nodes}
    wishes = [(_Wish((name,), need.size), need.may_share) for need in needs for name in need.names]
    if how == "colocate" and _can_share(needs):
        _, (engine, _), *others = wishes
        wishes = [(_Wish((*engine.members, LEARNER), engine.size), False), *others]
    whole = [wish for wish, may_share in wishes if not may_share]
    sharing = [name for wish, may_share in wishes if may_share for name in wish.members]
    blocks: list[Block] = []
    for wish in sorted(whole, key=lambda wish: -wish.size.num_gpus):
        blocks += _fit(wish, free, spread=how == "spread")
    num_left = sum(free.values())
    for members in _shares(sharing, num_left):
        blocks += _fit(_Wish(members, ONE_GPU), free, spread=how == "spread")
    is_complete = sum(len(block.members) for block in blocks) == sum(len(wish.members) for wish, _ in wishes)
    return blocks if is_complete else None


def _fit(wish: _Wish, free: dict[str, int], *, spread: bool) -> list[Block]:
    """Takes the room of the block out of ``free``; nothing where there is none."""
    for num_nodes in wish.size.node_counts:
        per_node = wish.size.num_gpus // num_nodes
        fitting = sorted((node for node in free if free[node] >= per_node), key=lambda node: free[node], reverse=spread)
        if len(fitting) >= num_nodes:
            for node in fitting[:num_nodes]:
                free[node] -= per_node
            return [Block(wish.members, per_node, tuple(fitting[:num_nodes]))]
    return []


def _shares(names: list[str], num_gpus: int) -> Iterator[tuple[str, ...]]:
    """One GPU for each while there are enough, otherwise as many on each as needed, in order."""
    per_gpu = math.ceil(len(names) / max(1, num_gpus))
    for start in range(0, len(names), max(1, per_gpu)):
        yield tuple(names[start : start + per_gpu])


# --- what cannot be given -----------------------------------------------------------------------------------------


def _refusal(scenario: Scenario, needs: list[Need], nodes: Sequence[NodeGpus]) -> str:
    largest = max(needs, key=lambda need: (not need.may_share, need.size.num_gpus, not need.is_optional))
    asked = "; ".join(_asked(need) for need in needs)
    return f"{largest.key}: {asked}. {_there(nodes)}. {_nearest(scenario, needs, largest, nodes)}"


def _asked(need: Need) -> str:
    who = need.names[0] if len(need.names) == 1 else f"{need.names[0]} … {need.names[-1]}"
    each = "" if len(need.names) == 1 else " each"
    gpus = "1 GPU" if need.size.num_gpus == 1 else f"{need.size.num_gpus} GPUs"
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


def _nearest(scenario: Scenario, needs: list[Need], largest: Need, nodes: Sequence[NodeGpus]) -> str:
    if not any(node.num_gpus for node in nodes):
        return f"Give the cluster GPUs, or set {largest.key}.device=cpu where that is enough"

    def fits(count: int, size: EngineSize) -> bool:
        smaller = largest._replace(names=largest.names[:count], size=size)
        others = [smaller if need is largest else need for need in needs]
        return _arrange(others, nodes, scenario.engines.placement) is not None

    count = bisect_right(range(1, len(largest.names)), 0, key=lambda count: 0 if fits(count, largest.size) else 1)
    if count:
        return f"The nearest that fits is {largest.key}.count={count}"
    if largest.size.node_counts[0] > 1 and fits(len(largest.names), EngineSize(largest.size.num_gpus, (1,))):
        return f"It fits without {largest.key}.sglang.nnodes"
    if largest.names == (LEARNER,):
        return _fewer_ranks(scenario.learner, fits)
    for num_gpus in range(largest.size.num_gpus - 1, 0, -1):
        if largest.size.num_gpus % num_gpus == 0 and fits(1, EngineSize(num_gpus, (1,))):
            return f"The largest engine that fits beside the others has {num_gpus} GPUs: reduce tp_size or pp_size"
    return "Not one engine fits beside the others: add GPUs, or take something off them with device: cpu"


def _fewer_ranks(learner: LearnerOptions, fits: Callable[[int, EngineSize], bool]) -> str:
    for num_ranks in range(learner.num_ranks - 1, 0, -1):
        if fits(1, learner_size(learner, num_ranks)):
            return (
                "Every node gets equally many ranks of a learner, and all of a tensor-parallel group are on one; "
                f"the most that fit are learner.num_ranks={num_ranks}"
            )
    return "No rank of the learner fits beside the others: add GPUs, or set learner.device=cpu where that is enough"
