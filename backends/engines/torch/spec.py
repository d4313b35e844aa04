"""The embedded engine as the house knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import (
    EngineContext,
    EngineSpec,
    RewardModelContext,
    RewardModelSpec,
    TeacherContext,
    TeacherSpec,
)
from penstock.backends.protocol import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backends.engines.options import EngineGroupOptions, EnginesOptions
    from penstock.backends.engines.spec import Broken, KeyPath
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand, OpenEngine, TeacherCommand


def _open(context: EngineContext) -> Backend[EngineCommand]:
    from penstock.backends.engines.torch.factory import open_torch_engine
    from penstock.backends.weights.transports import open_fetcher

    return open_torch_engine(
        model_folder=context.model_folder,
        options=context.options,
        sampling=context.sampling,
        max_context=context.max_context,
        dtype=context.dtype,
        fetcher=open_fetcher(),
        by_dataset=context.by_dataset,
        true_on_policy=context.true_on_policy,
        run_folder=context.run_folder,
        name=context.name,
        sleeps=context.sleeps,
    )


def _open_teacher(context: TeacherContext) -> Backend[TeacherCommand]:
    from penstock.backends.engines.torch.teacher import open_torch_teacher

    return open_torch_teacher(
        model_folder=context.model_folder,
        options=context.options,
        max_context=context.max_context,
        temperature=context.temperature,
    )


def _open_reward_model(context: RewardModelContext) -> Backend[OpenEngine]:
    from penstock.backends.engines.torch.reward_model import open_torch_reward_model

    return open_torch_reward_model(context)


def _longest_context(folder: Path) -> int:
    from penstock.backends.engines.torch.generic_config import read_engine_config

    return read_engine_config(folder).max_positions


def _longest_sample(folder: Path) -> int:
    from penstock.backends.checkpoint.model_config import read_model_config

    return read_model_config(folder).max_positions  # a teacher has no other forward pass


def _notice(folder: Path) -> str:
    from penstock.backends.engines.torch.generic_config import GenericConfig, read_engine_config

    config = read_engine_config(folder)
    return config.notice if isinstance(config, GenericConfig) else ""


def _rules(path: KeyPath, group: EngineGroupOptions, options: EnginesOptions) -> Iterator[Broken]:
    if group.double_buffering and options.placement == "colocate":
        yield (
            (*path, DOUBLE_BUFFERING),
            "a colocated engine swaps while nothing runs, and in the learner's turn holds no memory to prepare weights "
            "in; leave it out, or take another engines.placement",
        )


def _adapter_rules(path: KeyPath, group: EngineGroupOptions, options: EnginesOptions) -> Iterator[Broken]:
    if group.double_buffering:
        yield (
            (*path, DOUBLE_BUFFERING),
            "adapters that are published alone are small and loaded where they are computed with; leave it out, or set "
            "learner.lora.publish: merged",
        )


def _true_on_policy(path: KeyPath, group: EngineGroupOptions) -> Iterator[Broken]:
    if group.device != "cpu":
        yield (
            (*path, "device"),
            f"embedded engines have the learner's bits on a CPU; found {group.device}, with learner.true_on_policy set "
            "it to cpu",
        )
    if group.num_threads != 1:
        yield (
            (*path, "num_threads"),
            f"threads divide sums by their number; found {group.num_threads}, with learner.true_on_policy set it to 1",
        )


DOUBLE_BUFFERING: Final = "double_buffering"

TORCH: Final = EngineSpec(
    open=_open,
    capabilities=frozenset(
        {
            Capability.SEEDED_SAMPLING,
            Capability.IN_FLIGHT,
            Capability.INTERRUPT,
            Capability.STAGED_WEIGHTS,
            Capability.CANARY,
            Capability.GENERATES,
            Capability.HOLDS_WEIGHTS,
            Capability.EXACT,
            Capability.RECORDS_EXPERTS,
            Capability.RECORDS_KEPT,
            Capability.ANSWERS_JUDGES,
            Capability.EMBEDDED,
            Capability.SEES,
            Capability.PROFILED,
            Capability.TAKES_FP8,
            Capability.TAKES_ADAPTERS,
            Capability.SAMPLES_PER_CALL,
        }
    ),
    keys=(DOUBLE_BUFFERING,),
    rules=_rules,
    adapter_rules=_adapter_rules,
    longest_context=_longest_context,
    notice=_notice,
    true_on_policy=_true_on_policy,
    modules=(
        "penstock.backends.engines.torch.factory",
        "penstock.backends.episodes",
        "penstock.backends.weights.transports",
    ),
    teacher=TeacherSpec(open=_open_teacher, has_likeliest=True, longest_sample=_longest_sample),
    reward_model=RewardModelSpec(open=_open_reward_model),
)
