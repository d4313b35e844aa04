"""Engines of SGLang servers as the house knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import take_turns
from penstock.backends.engines.served.sglang.environment import find_environment, has_cuda_gpu
from penstock.backends.engines.served.sglang.server_options import (
    ServerOptionError,
    check_server_options,
    deterministic_attention_backends,
    supports_seeded_sampling,
)
from penstock.backends.engines.served.sglang.size import engine_size
from penstock.backends.engines.served.sglang.weight_rules import ALGORITHM, draft_transports, weight_rules
from penstock.backends.engines.spec import (
    EngineContext,
    EngineSize,
    EngineSpec,
    RewardModelContext,
    RewardModelSpec,
    TeacherContext,
    TeacherSpec,
)
from penstock.backends.protocol import Capability
from penstock.backends.weights.spec import DISK, DISTRIBUTED, NETWORK, SHARED_MEMORY, TENSOR
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backends.checkpoint.options import ModelOptions
    from penstock.backends.engines.options import EngineGroupOptions, EnginesOptions
    from penstock.backends.engines.reward_model_options import RewardModelOptions
    from penstock.backends.engines.spec import Broken, EngineBlock, KeyPath
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand, OpenEngine, TeacherCommand


def _open(context: EngineContext) -> Backend[EngineCommand]:
    from penstock.backends.engines.served.sglang.create import open_sglang_engine

    return open_sglang_engine(context)


def _open_teacher(context: TeacherContext) -> Backend[TeacherCommand]:
    from penstock.backends.engines.served.sglang.teacher import open_sglang_teacher

    return open_sglang_teacher(context)


def _open_reward_model(context: RewardModelContext) -> Backend[OpenEngine]:
    from penstock.backends.engines.served.sglang.reward_model import open_sglang_reward_model

    return open_sglang_reward_model(context)


def _check_joining(address: str, folder: Path, model: ModelOptions) -> None:
    from penstock.backends.engines.served.sglang.joining import check_joining

    check_joining(address, folder, dtype=model.dtype, max_context=model.max_context)


def _longest_sample(folder: Path) -> int | None:
    from penstock.backends.engines.served.sglang.teacher import longest_sample

    return longest_sample(folder)


def _granted(group: EngineGroupOptions) -> frozenset[Capability]:
    can_draw = supports_seeded_sampling(group.sglang, is_cpu=group.device == "cpu")
    # Drafted tokens are not drawn from what is left, and routers pass on only what they know.
    says_kept = group.sglang.get(ALGORITHM) is None and group.router is None
    found = {Capability.SEEDED_SAMPLING: can_draw, Capability.RECORDS_KEPT: says_kept}
    return frozenset(capability for capability, is_there in found.items() if is_there)


def _size(options: EngineBlock) -> EngineSize | None:
    """Servers that somebody else has started have theirs."""
    return None if options.addresses else engine_size(options.sglang)


def _rules(path: KeyPath, group: EngineGroupOptions, options: EnginesOptions) -> Iterator[Broken]:
    block = ".".join(map(str, path))
    if options.seeded_sampling and Capability.SEEDED_SAMPLING not in _granted(group):
        yield (
            ("engines", "seeded_sampling"),
            "an SGLang server draws by a sample's seed only on a GPU, with enable_deterministic_inference and an "
            f"attention backend that can ({', '.join(deterministic_attention_backends())}); set these under "
            f"{block}.sglang, or seeded_sampling to false",
        )
    if options.record_experts and group.device == "cpu":
        yield (
            ("engines", "record_experts"),
            f"an SGLang server does not start with it on a CPU, as {block}.device says; set it to false",
        )
    yield from _option_rules(path, group)
    yield from weight_rules(path, group, options)
    if group.router is not None and not group.addresses:
        yield (*path, "router"), "the servers behind the router are needed as well; list them under addresses"
    wanted = 1 if group.router is not None else len(group.addresses)
    if group.addresses and group.count != wanted:
        why = "the servers behind one router are one engine" if group.router else f"there are {wanted} addresses"
        yield (*path, "count"), f"{why}; set it to {wanted}, found {group.count}"
    if take_turns(options) and group.sglang.get("enable_memory_saver") is False:
        yield (
            (*path, "sglang", "enable_memory_saver"),
            "a server on the learner's GPUs has to give its memory up while that trains; remove it, such a server gets "
            "true",
        )


def _adapter_rules(path: KeyPath, group: EngineGroupOptions, options: EnginesOptions) -> Iterator[Broken]:
    if group.device == "cpu":
        yield (
            (*path, "device"),
            "SGLang's layers for adapters want pinned memory of the host, which its CPU build cannot have; take a GPU "
            "or embedded engines (backend: torch), or set learner.lora.publish: merged",
        )
    if group.addresses:
        yield (
            (*path, "addresses"),
            "servers that run already were not started for the adapters of learner.lora.publish: adapter; remove the "
            "addresses, so that they are started here, or set it to merged",
        )
    if take_turns(options):
        yield (
            ("engines", "lent" if options.lent else "placement"),
            "a server on the learner's GPUs lets go of its adapters while that trains, and does not know it; remove "
            "engines.lent or engines.placement: colocate, or set learner.lora.publish: merged",
        )
    if group.sglang.get(ALGORITHM) is not None:
        yield (
            (*path, "sglang", ALGORITHM),
            "drafts are made without the adapters of learner.lora.publish: adapter; remove it, or set that to merged",
        )


def _true_on_policy(path: KeyPath, group: EngineGroupOptions) -> Iterator[Broken]:
    wanted = "enable_deterministic_inference: true, rl_on_policy_target: fsdp and an attention backend that can"
    backends = ", ".join(deterministic_attention_backends())
    if group.device == "cpu":
        yield (
            (*path, "device"),
            "an SGLang server cannot infer deterministically on a CPU, so its log-probs cannot have the learner's bits "
            f"there; learner.true_on_policy needs a GPU for the server and one for the learner, with {wanted} "
            f"({backends}); or take embedded engines (backend: torch)",
        )
    elif group.addresses:
        yield (
            (*path, "addresses"),
            "servers that run already do not say which kernels they compute with; with learner.true_on_policy remove "
            "the addresses, so that they are started here",
        )
    elif Capability.SEEDED_SAMPLING not in _granted(group) or group.sglang.get("rl_on_policy_target") != "fsdp":
        yield (*path, "sglang"), f"with learner.true_on_policy a server needs {wanted} ({backends})"


def _option_rules(path: KeyPath, options: EngineBlock) -> Iterator[Broken]:
    if options.addresses and options.sglang:
        yield (*path, "sglang"), "servers that run already have their options; remove it, or the addresses"
    try:
        check_server_options(options.sglang)
        engine_size(options.sglang)
    except ServerOptionError as error:
        yield (*path, "sglang", error.key), error.text
    except UserFault as error:
        yield (*path, "sglang"), str(error)


def _teacher_rules(path: KeyPath, teacher: TeacherOptions) -> Iterator[Broken]:
    if teacher.addresses and teacher.count != len(teacher.addresses):
        yield (
            (*path, "count"),
            f"there are {len(teacher.addresses)} addresses; set it to {len(teacher.addresses)}, found {teacher.count}",
        )
    yield from _on_one_node(path, teacher, "a teacher")


def _reward_model_rules(path: KeyPath, model: RewardModelOptions) -> Iterator[Broken]:
    yield from _on_one_node(path, model, "a reward model")


def _on_one_node(path: KeyPath, options: EngineBlock, who: str) -> Iterator[Broken]:
    broken = list(_option_rules(path, options))
    yield from broken
    if not broken and engine_size(options.sglang).node_counts[0] > 1:
        yield (*path, "sglang"), f"{who}'s server lies on one node; remove nnodes"


def _check_machine(options: EngineBlock) -> None:
    """The environment that servers run in has been built, where any is started here."""
    if options.addresses:
        return
    find_environment(is_cpu=options.device == "cpu" or (options.device == "auto" and not has_cuda_gpu()))


SGLANG: Final = EngineSpec(
    open=_open,
    capabilities=frozenset(
        {
            Capability.IN_FLIGHT,
            Capability.INTERRUPT,
            Capability.CANARY,
            Capability.RETRACT,
            Capability.GENERATES,
            Capability.HOLDS_WEIGHTS,
            Capability.RECORDS_EXPERTS,
            Capability.MEDIA,
            Capability.SEES,
            Capability.ANSWERS_JUDGES,
            Capability.PROFILED,
            Capability.JOINS,
            Capability.TAKES_FP8,
            Capability.TAKES_ADAPTERS,
            Capability.SAMPLES_PER_CALL,
            Capability.CONSTRAINED,
        }
    ),
    keys=("sglang", "addresses", "router"),
    granted=_granted,
    size=_size,
    rules=_rules,
    true_on_policy=_true_on_policy,
    adapter_rules=_adapter_rules,
    transports=(DISK, SHARED_MEMORY, DISTRIBUTED, TENSOR, NETWORK),
    safe_transports=draft_transports,
    needs="SGLang's environment",
    check_machine=_check_machine,
    check_joining=_check_joining,
    teacher=TeacherSpec(
        open=_open_teacher,
        temperature=1.0,
        has_likeliest=True,
        answers_judges=True,
        rules=_teacher_rules,
        longest_sample=_longest_sample,
    ),
    reward_model=RewardModelSpec(open=_open_reward_model, rules=_reward_model_rules),
)
