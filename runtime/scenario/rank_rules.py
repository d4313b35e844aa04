"""What a learner over several processes cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, EngineSize
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.architecture import UnreadableModelError, find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.scenario.rules import Broken
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def rank_rules(s: Scenario) -> Iterator[Broken]:
    """See :mod:`penstock.runtime.scenario.rules`."""
    learner, key = s.learner, ("learner", "num_ranks")
    yield from _shards(s)
    if learner.tensor_parallel > 1:
        yield from _computing_together(s)
    if learner.critic_ranks:
        yield from _critic_apart(s)
    if learner.num_ranks == 1:
        return
    if is_modelled(learner):
        yield key, "a simulated learner is not divided; set learner.simulated.step_s to what that many ranks would take"
        return
    if learner.device not in ("auto", "cpu", "cuda"):
        yield (
            ("learner", "device"),
            f"{learner.device} is one device, and each of {learner.num_ranks} ranks needs one of its own; set it to "
            "cuda, auto or cpu",
        )
    if learner.rank_timeout_s > learner.step_timeout_s:
        yield (
            ("learner", "rank_timeout_s"),
            f"a rank that keeps the others waiting is to be noticed before the whole step is late; set it below "
            f"learner.step_timeout_s, which is {learner.step_timeout_s:g}",
        )
    if learner.compile and learner.parallel == "fsdp":
        yield (
            ("learner", "compile"),
            "blocks whose weights are shared out over ranks are not compiled; remove it, or set learner.parallel: ddp",
        )
    if s.engines.placement == "colocate" and "cuda" in (s.engines.device, learner.device):
        yield from _colocated(s)


def _shards(s: Scenario) -> Iterator[Broken]:
    """Copies of the weights that are shared out, each over as many ranks."""
    learner, size = s.learner, s.learner.shard_size
    if size is None:
        return
    key, each = ("learner", "shard_size"), s.learner.tensor_parallel
    if LEARNERS.spec(learner.backend).has_layout or learner.parallel != "fsdp":
        found = f"learner.backend: {learner.backend} with learner.parallel: {learner.parallel}"
        yield key, f"says over how many ranks fsdp shares weights out, found {found}; remove it"
    elif learner.num_ranks % (size * each):
        times = f" times the {each} of learner.tensor_parallel" if each > 1 else ""
        yield (
            key,
            f"{size} ranks share a copy of the weights, and learner.num_ranks, {learner.num_ranks}, is no multiple of "
            f"it{times}; set it to a divisor of {'that' if each == 1 else learner.num_ranks // each}, or to null",
        )


def _computing_together(s: Scenario) -> Iterator[Broken]:
    """``learner.tensor_parallel`` of the torch learner."""
    learner, size = s.learner, s.learner.tensor_parallel
    key: KeyPath = ("learner", "tensor_parallel")
    if LEARNERS.spec(learner.backend).has_layout:
        yield key, f"backend {learner.backend} has learner.megatron.tensor_parallel; set that one, and remove this"
        return
    if is_modelled(learner):
        yield key, "a simulated learner is not divided; remove it"
        return
    if learner.parallel != "fsdp":
        yield key, f"goes with learner.parallel: fsdp, found {learner.parallel}; set it to fsdp, or remove this"
    if learner.num_ranks % size:
        yield (
            key,
            f"{size} ranks compute together, and learner.num_ranks, {learner.num_ranks}, is no multiple of it; set it "
            "to a divisor of that",
        )
    if learner.lora is not None:
        yield (
            key,
            "adapters are not divided over ranks that compute together; set it to 1 with learner.lora, whose base "
            "model learner.parallel: fsdp shares out",
        )
    if learner.true_on_policy:
        yield key, "adds up in another order than an engine does; set it to 1, or learner.true_on_policy: false"
    try:
        found = find_architecture(s)
    except UnreadableModelError:
        return  # another rule's to say, or of a family that is not known here: then the ranks say it
    if found is not None:
        yield from _heads(found.architecture, size, key)


def _critic_apart(s: Scenario) -> Iterator[Broken]:
    """Policy and critic on ranks of their own, each part divided over its own."""
    learner, key = s.learner, ("learner", "critic_ranks")
    if not LEARNERS.spec(learner.backend).parts_critic:
        has = "torch or megatron"
        yield key, f"backend {learner.backend} keeps a critic where the policy is; set it to 0, or backend to {has}"
        return
    if learner.objective.critic != "own":
        have = {
            "none": "there is no critic; set it to 0, or learner.objective to ppo or another with critic: own",
            "shared": "critic: shared is a head on the policy itself, whose ranks it needs; set it to 0, or "
            "learner.objective.critic to own",
        }
        yield key, have[learner.objective.critic]
        return
    parts = {"policy": learner.num_ranks - learner.critic_ranks, "critic": learner.critic_ranks}
    if parts["policy"] < 1:
        yield (
            key,
            f"leaves no rank to the policy: learner.num_ranks, {learner.num_ranks}, counts those of both; set that to "
            f"{learner.critic_ranks + 1} or more, or this below it",
        )
        return
    each = learner.tensor_parallel * (learner.shard_size or 1)
    divided = " × ".join(
        f"learner.{name}" for name in ("tensor_parallel", "shard_size") if getattr(learner, name) not in (1, None)
    )
    for part, count in parts.items():
        if count % each and learner.num_ranks % each == 0:
            yield (
                key,
                f"leaves {count} ranks to the {part}, and {each} ({divided}) does not divide that; set this and "
                "learner.num_ranks so that both parts have a multiple of it",
            )
        if count == 1 and learner.cpu_offload:
            yield (
                key,
                f"leaves one rank to the {part}, which has no shards that learner.cpu_offload could move; give each "
                "part two or more, or remove that",
            )


def _heads(architecture: Architecture, size: int, key: KeyPath) -> Iterator[Broken]:
    if architecture.experts is not None:
        yield key, "the torch learner does not divide experts so; set it to 1, or learner.backend: megatron"
    for what, count in (("attention", architecture.num_heads), ("key-value", architecture.num_kv_heads)):
        if count % size:
            yield key, f"{size} does not divide the {count} {what} heads of the model; set it to a divisor of {count}"
            return


def _colocated(s: Scenario) -> Iterator[Broken]:
    """The ranks are put on the GPUs of the first engines, on one node."""
    num_ranks, sizes = s.learner.num_ranks, list[EngineSize]()
    for group in engine_groups(s.engines):
        try:
            size = ENGINES.spec(group.backend).size(group) if group.device != "cpu" else None
        except UserFault:
            return  # another rule's to say
        sizes += [] if size is None else [size] * group.count
    num_gpus = sum(size.num_gpus for size in sizes)
    if num_gpus < num_ranks:
        whose = "the engine, which has" if len(sizes) == 1 else f"the {len(sizes)} engines, which together have"
        yield (
            ("learner", "num_ranks"),
            f"colocated, the learner is put on the GPUs of {whose} {num_gpus}, and each of {num_ranks} ranks needs one "
            f"of its own; set it to {num_gpus} or less, take more or larger engines, or another engines.placement",
        )
    elif sizes[0].num_gpus < num_ranks and sizes[0].node_counts[0] > 1:
        yield (
            ("learner", "num_ranks"),
            f"colocated, {num_ranks} ranks lie over several engines, which have to be on one node with them; let "
            "engines be on one node each, or give one engine as many GPUs as there are ranks",
        )
