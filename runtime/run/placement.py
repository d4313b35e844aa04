"""Which GPUs of which nodes each actor gets. Pure.

What is placed is a *block*: GPUs that belong together, on one node or an equal number on each of several, and the
actors that use them. By default each actor has a block of its own (disaggregated). Several share one in three cases:
with ``engines.placement: colocate`` the learner is put on the GPUs of the first engines, as many engines as have a GPU
for each rank; those of ``engines.lent`` are put on the learner's, one behind the other; and embedded engines and the
learner share GPUs, in equal parts, where there are fewer of them than takers.

Invariants:

* A block lies on one node whenever one has room for it, otherwise on as few as its engine, or the learner, can be
  divided over.
* The ranks of a learner that lies over several engines, or lends its GPUs, are on one node with all of these, and each
  engine has GPUs that no other engine uses.
* Larger blocks are placed first. ``auto`` and ``pack`` put each on the node with the least room that suffices,
  ``spread`` on the one with the most.
* What the cluster cannot give is refused, never made smaller; only ``auto`` devices do without, all together, in a
  cluster that has no GPU at all.
* At the start of a run on a cluster, engines that may join later have no place yet: each is given GPUs of its own when
  it does, and gives them back when it leaves (``engines.gpu_timeout_s``).
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from penstock.backends.engines.options import (
    are_elastic,
    engine_groups,
    largest_groups,
    lent_engines,
    most_engines,
    num_engines,
)
from penstock.backends.engines.spec import ENGINES, ONE_GPU, EngineSize, are_modelled
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, engine_index, engine_name, is_engine, reward_model_name, teacher_name
from penstock.runtime.run.gpu_needs import Need, NodeGpus, Wish, learner_size
from penstock.runtime.run.placement_refusal import few, refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.backends.engines.spec import EngineBlock
    from penstock.runtime.scenario import Scenario

FROM_RAY: Final = ("auto", "cuda")
"""Devices that Ray assigns. ``cuda:1`` is the user's own choice, ``cpu`` needs none."""
ANY_NODE: Final = "any"
"""In a block: where Ray finds room, now or later."""


class Block(NamedTuple):
    """GPUs that belong together, and who uses them."""

    members: tuple[str, ...]
    gpus_per_node: int
    node_ids: tuple[str, ...]
    """The first one is where its members run."""
    engine_gpus: tuple[int, ...] = ()
    """Where the learner lies over several engines, or lends its GPUs: how many each of them has, in their order."""

    @property
    def num_gpus(self) -> int:
        """On all of its nodes."""
        return self.gpus_per_node * len(self.node_ids)


class Placement(NamedTuple):
    """Who gets which GPUs; who is in no block gets none."""

    blocks: tuple[Block, ...] = ()
    num_learner_ranks: int = 1
    """So many of its block's GPUs the learner uses."""
    on_demand: tuple[Wish, ...] = ()
    """Engines that are alone on their GPUs, and have them while they are in the run, or when they join it."""

    def block_of(self, name: str) -> Block | None:
        """The block that this actor uses."""
        return next((block for block in self.blocks if name in block.members), None)

    def gpus_of(self, name: str) -> slice:
        """Which of the GPUs that its block has on a node this actor uses."""
        block = self.block_of(name)
        if block is None or len(block.members) == 1:
            return slice(None)
        if name == LEARNER:
            return slice(self.num_learner_ranks)
        if not block.engine_gpus:
            return slice(None)
        index = block.members.index(name)
        first = sum(block.engine_gpus[:index])
        return slice(first, first + block.engine_gpus[index])


def reserves_on_demand(scenario: Scenario) -> bool:
    """Whether engines are given GPUs when they join, and not before: there may be more nodes by then."""
    engines = scenario.engines
    return scenario.runtime.ray_address is not None and are_elastic(engines) and engines.gpu_timeout_s is not None


def needs_of(scenario: Scenario, *, at_start: bool = False) -> list[Need]:
    """Everybody who asks Ray for GPUs of its own: the learner, then the engines, then the teachers and reward models.

    Args:
        scenario: that asks.
        at_start: without the engines that are given GPUs when they join.

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
    groups, num_lent = largest_groups(scenario.engines), scenario.engines.lent  # the last of the one kind that there is
    if at_start and reserves_on_demand(scenario):
        groups, num_lent = engine_groups(scenario.engines), 0
    for index, group in enumerate(groups):
        own = replace(group, count=group.count - num_lent) if num_lent else group
        needs += _engine_need(first, own, f"engines.more[{index - 1}]" if index else "engines")
        first += group.count
    needs += _teachers(scenario)
    if (model := scenario.reward_model) is not None:
        needs += _need(tuple(map(reward_model_name, range(model.count))), model, "reward_model")
    return needs


def _engine_need(first: int, group: EngineGroupOptions, key: str) -> list[Need]:
    return _need(tuple(engine_name(first + number) for number in range(group.count)), group, key)


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


def num_gpus_asked(scenario: Scenario, *, at_start: bool = False) -> int:
    """By all together, or by those of :func:`needs_of` ``at_start``; those of engines that the learner is put on count
    once."""
    needs = needs_of(scenario, at_start=at_start)
    is_guest = scenario.engines.placement == "colocate" and _can_share(needs)
    return sum(len(need.names) * need.size.num_gpus for need in needs[is_guest:])


def place(scenario: Scenario, nodes: Sequence[NodeGpus], *, at_start: bool = False) -> Placement:
    """A place for everybody who needs one. Of nodes that are equally good the earlier one is taken.

    Args:
        scenario: whose actors are placed.
        nodes: of the cluster.
        at_start: of the run, when engines that are given GPUs as they join get none yet.

    Raises:
        UserFault: the cluster cannot give it, with what was asked, what there is, and what would fit; or the options of
            an engine give no number of GPUs.
    """
    needs = needs_of(scenario, at_start=at_start)
    if not any(node.num_gpus for node in nodes) and all(need.is_optional for need in needs):
        return Placement()
    num_ranks = scenario.learner.num_ranks
    blocks = _arrange(scenario, needs, nodes)
    if blocks is None:
        together = _together(scenario, needs)
        raise UserFault(refusal_of(scenario, needs, nodes, together, lambda some: _has_place(scenario, some, nodes)))
    placement = Placement(tuple(blocks), num_ranks, _on_demand(scenario, blocks) if at_start else ())
    if (shared := _crowded(blocks, num_ranks)) is not None:
        *engines, _ = shared.members
        raise UserFault(
            f"learner.num_ranks: the learner is put on the GPUs of {few(engines)}, which "
            f"{'has' if len(engines) == 1 else 'have'} {shared.gpus_per_node} on a node, and each of {num_ranks} ranks "
            f"needs one of its own; set it to {shared.gpus_per_node} or less, take more or larger engines, "
            "or take another engines.placement"
        )
    return placement


def _on_demand(scenario: Scenario, blocks: Sequence[Block]) -> tuple[Wish, ...]:
    if not reserves_on_demand(scenario):
        return ()
    group = replace(scenario.engines, count=most_engines(scenario.engines) - scenario.engines.lent)
    shared = {name for block in blocks if len(block.members) > 1 for name in block.members}
    return tuple(
        Wish((name,), size) for name, size in _engines(_engine_need(0, group, "engines")) if name not in shared
    )


def late_block(wish: Wish, nodes: Sequence[NodeGpus], placement: Placement) -> Block:
    """What an engine asks for that joins: as the nodes can give it now, whichever they are; where they cannot, divided
    as the engines of the start are, so that a node that comes is of use.

    Args:
        wish: of :attr:`Placement.on_demand`.
        nodes: of the cluster, with what is free on them.
        placement: of the start.
    """
    fitting = _fit(wish, {node.node_id: node.num_gpus for node in nodes}, spread=False)
    alike = (len(each.node_ids) for each in placement.blocks if is_engine(each.members[0]) and len(each.members) == 1)
    num_nodes = len(fitting[0].node_ids) if fitting else min(alike, default=wish.size.node_counts[0])
    return Block(wish.members, wish.size.num_gpus // num_nodes, (ANY_NODE,) * num_nodes)


def _has_place(scenario: Scenario, needs: Sequence[Need], nodes: Sequence[NodeGpus]) -> bool:
    blocks = _arrange(scenario, needs, nodes)
    num_ranks = next((n.size.num_gpus for n in needs if n.names == (LEARNER,)), 1)
    return blocks is not None and _crowded(blocks, num_ranks) is None


def _crowded(blocks: Sequence[Block], num_ranks: int) -> Block | None:
    """The block that the learner shares, where it has fewer GPUs on a node than ranks."""
    shared = (block for block in blocks if LEARNER in block.members and len(block.members) > 1)
    return next((block for block in shared if block.gpus_per_node < num_ranks), None)


def has_nodes_of_its_own(scenario: Scenario) -> bool:
    """Whether the nodes of the learner's block are the learner's: an engine that it is put on may lie over several, and
    all ranks are on the first of them then; with engines that it lends its GPUs it is on one."""
    return _together(scenario, needs_of(scenario)) is None


def colocated(scenario: Scenario) -> frozenset[str]:
    """The engines that take turns with the learner: the first of those that get GPUs, as many as have one for each
    rank; where none gets any, as if they got them. Simulated ones all do, as if the learner were spread over them."""
    if scenario.engines.placement != "colocate" or scenario.run.only == "learner":
        return frozenset()
    if are_modelled(scenario.engines):
        return frozenset(engine_name(index) for index in range(num_engines(scenario.engines)))
    num_ranks = scenario.learner.num_ranks
    engines = _engines(needs_of(scenario)) or _engines(_without_devices(scenario))
    return frozenset(name for name, _ in _under(engines, num_ranks))


def on_learners_devices(scenario: Scenario) -> frozenset[str]:
    """The engines that take turns with the learner, and those that are lent its devices while it waits."""
    return colocated(scenario) | lent_engines(scenario.engines)


def sharing_devices(scenario: Scenario) -> frozenset[str]:
    """The actors on devices that others take in turns with them: these engines, and the learner."""
    engines = on_learners_devices(scenario)
    return engines | {LEARNER} if engines else engines


def _without_devices(scenario: Scenario) -> list[Need]:
    """What engines would ask for if they took GPUs from Ray."""
    groups = [replace(group, device="cuda") for group in engine_groups(scenario.engines)]
    firsts = accumulate((group.count for group in groups), initial=0)
    each = (_engine_need(first, group, "engines") for first, group in zip(firsts, groups, strict=False))
    return [need for needs in each for need in needs]


def _engines(needs: Sequence[Need]) -> list[tuple[str, EngineSize]]:
    return [(name, need.size) for need in needs if is_engine(need.names[0]) for name in need.names]


def _under(engines: Sequence[tuple[str, EngineSize]], num_ranks: int) -> list[tuple[str, EngineSize]]:
    """The first engines, until they have a GPU for each of so many ranks, or there is none left."""
    found: list[tuple[str, EngineSize]] = []
    for name, size in engines:
        if sum(each.num_gpus for _, each in found) >= num_ranks:
            break
        found.append((name, size))
    return found


def _together(scenario: Scenario, needs: Sequence[Need]) -> Wish | None:
    """The learner with the engines that take turns with it, on one node where it lies over several or lends its GPUs;
    None where none do, or not on GPUs that Ray assigns."""
    if scenario.engines.lent:
        return _lending(scenario, needs)
    if scenario.engines.placement != "colocate" or not _can_share(needs):
        return None
    engines = _under(_engines(needs), needs[0].size.num_gpus)
    members = (*(name for name, _ in engines), LEARNER)
    if len(engines) == 1:
        return Wish(members, engines[0][1])
    gpus = tuple(size.num_gpus for _, size in engines)
    return Wish(members, EngineSize(sum(gpus), (1,)), gpus)


def _lending(scenario: Scenario, needs: Sequence[Need]) -> Wish | None:
    """The learner with the engines on its GPUs, which have the first of them, one engine behind the other."""
    learner = next((need for need in needs if need.names == (LEARNER,)), None)
    if learner is None:
        return None
    names = sorted(lent_engines(scenario.engines), key=engine_index)
    gpus = tuple(size.num_gpus for name in names for _, size in _engines(_need((name,), scenario.engines, "engines")))
    return Wish((*names, LEARNER), EngineSize(learner.size.num_gpus, (1,)), gpus)


def _can_share(needs: Sequence[Need]) -> bool:
    """Whether there is an engine that the learner can be put on."""
    return len(needs) > 1 and needs[0].names == (LEARNER,) and is_engine(needs[1].names[0])


def _arrange(scenario: Scenario, needs: Sequence[Need], nodes: Sequence[NodeGpus]) -> list[Block] | None:
    """First fit, largest first. That finds a place for all where sizes divide the nodes, as powers of two do."""
    free, how = {node.node_id: node.num_gpus for node in nodes}, scenario.engines.placement
    wishes = [(Wish((name,), need.size), need.may_share) for need in needs for name in need.names]
    if (together := _together(scenario, needs)) is not None:
        wishes = [(together, False), *(each for each in wishes if each[0].members[0] not in together.members)]
    whole = [wish for wish, may_share in wishes if not may_share]
    sharing = [name for wish, may_share in wishes if may_share for name in wish.members]
    blocks: list[Block] = []
    for wish in sorted(whole, key=lambda wish: -wish.size.num_gpus):
        blocks += _fit(wish, free, spread=how == "spread")
    num_left = sum(free.values())
    for members in _shares(sharing, num_left):
        blocks += _fit(Wish(members, ONE_GPU), free, spread=how == "spread")
    is_complete = sum(len(block.members) for block in blocks) == sum(len(wish.members) for wish, _ in wishes)
    return blocks if is_complete else None


def _fit(wish: Wish, free: dict[str, int], *, spread: bool) -> list[Block]:
    """Takes the room of the block out of ``free``; nothing where there is none."""
    for num_nodes in wish.size.node_counts:
        per_node = wish.size.num_gpus // num_nodes
        fitting = sorted((node for node in free if free[node] >= per_node), key=lambda node: free[node], reverse=spread)
        if len(fitting) >= num_nodes:
            for node in fitting[:num_nodes]:
                free[node] -= per_node
            return [Block(wish.members, per_node, tuple(fitting[:num_nodes]), wish.engine_gpus)]
    return []


def _shares(names: list[str], num_gpus: int) -> Iterator[tuple[str, ...]]:
    """One GPU for each while there are enough, otherwise as many on each as needed, in order."""
    per_gpu = math.ceil(len(names) / max(1, num_gpus))
    for start in range(0, len(names), max(1, per_gpu)):
        yield tuple(names[start : start + per_gpu])
