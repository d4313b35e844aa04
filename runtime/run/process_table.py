"""Which processes a scenario makes, before any of them is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backends.engines.options import are_elastic, engine_groups, fewest_engines, most_engines
from penstock.backends.engines.passing_on import pass_on
from penstock.backends.engines.spec import ENGINES
from penstock.backends.protocol import Capability
from penstock.backends.weights.spec import NETWORK
from penstock.messages.names import (
    BUFFER,
    FILTER,
    LEARNER,
    PROMPT_SOURCE,
    SCORER,
    WEIGHT_PUBLISHER,
    engine_name,
    reward_model_name,
    teacher_name,
)
from penstock.messages.texts import counted
from penstock.runtime.run.placement import reserves_on_demand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.backends.engines.reward_model_options import RewardModelOptions
    from penstock.backends.learners.options import LearnerOptions
    from penstock.runtime.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Placed:
    """One row of the placement: actors that are alike."""

    name: str
    num_processes: int
    num_threads: int
    device: str
    remark: str = ""


def placement(scenario: Scenario) -> list[Placed]:
    """The rows, in the order in which a sample passes them."""
    learner, rewards = scenario.learner, scenario.reward.num_workers
    if scenario.run.only == "learner":
        return [Placed(BUFFER, 1, 1, "cpu", "batches that were recorded"), _learner(learner)]
    return [
        Placed(PROMPT_SOURCE, 1, 1, "cpu"),
        *_engines(scenario),
        *_teachers(scenario),
        *_reward_models(scenario),
        Placed(SCORER, 1 + rewards, 1, "cpu", f"with {rewards} for the reward function"),
        Placed(FILTER, 1, 1, "cpu"),
        Placed(BUFFER, 1, 1, "cpu", scenario.staleness.policy),
        _learner(learner),
        Placed(WEIGHT_PUBLISHER, 1, 1, "cpu", f"transport {scenario.weights.transport}{_fan_out(scenario)}"),
    ]


def _fan_out(scenario: Scenario) -> str:
    weights = scenario.weights
    if pass_on(scenario.engines, transport=weights.transport, fan_out=weights.fan_out):
        return ", engines pass them on to each other"
    return ", all engines take them from the learner" if weights.transport == NETWORK else ""


def _learner(options: LearnerOptions) -> Placed:
    num_ranks, threads, device = options.num_ranks, options.num_threads, options.device
    if num_ranks == 1:
        return Placed(LEARNER, 1, threads, device, options.backend)
    each = "" if device == "cpu" else ", 1 GPU each where there are any" if device == "auto" else ", 1 GPU each"
    parts = f" ({num_ranks - apart} of the policy, {apart} of the critic)" if (apart := options.critic_ranks) else ""
    return Placed(
        LEARNER, 1 + num_ranks, threads, device, f"{options.backend}, {counted(num_ranks, 'rank')}{parts}{each}"
    )


def _engines(scenario: Scenario) -> Iterator[Placed]:
    first, options = 0, scenario.engines
    for group in engine_groups(options):
        last = first + group.count - 1
        yield Placed(
            engine_name(first) if last == first else f"{engine_name(first)} … {engine_name(last)}",
            group.count,
            group.num_threads,
            group.device,
            f"{group.backend}, {group.slots} slots each{_gpus(group)}{_bounds(scenario)}",
        )
        first = last + 1


def _bounds(scenario: Scenario) -> str:
    """Where engines may join and leave; then there is one kind of them."""
    options = scenario.engines
    if not are_elastic(options):
        return ""
    by_bound = f", by the bound after {options.scale_hold_s:g} s or more" if options.scale == "by_bound" else ""
    least, most = fewest_engines(options), most_engines(options)
    if options.lent:
        return f"; {least} at least and {most} at most{by_bound}, {options.lent} of them on the learner's device"
    if reserves_on_demand(scenario):
        return f"; {least} at least and {most} at most{by_bound}, with GPUs while they are there"
    return f"; {least} at least and {most} at most{by_bound}, for which GPUs are reserved"


def _teachers(scenario: Scenario) -> Iterator[Placed]:
    teacher = scenario.teacher
    if teacher is None:
        return
    first, last = teacher_name(0), teacher_name(teacher.count - 1)
    where = ", running already" if teacher.addresses else ""
    yield Placed(
        first if first == last else f"{first} … {last}",
        teacher.count,
        teacher.num_threads,
        teacher.device,
        f"{teacher.backend}, {teacher.slots} samples each{where}",
    )


def _reward_models(scenario: Scenario) -> Iterator[Placed]:
    if (model := scenario.reward_model) is not None:
        first, last = reward_model_name(0), reward_model_name(model.count - 1)
        name = first if first == last else f"{first} … {last}"
        remark = f"{model.backend}, {model.slots} samples each{_gpus(model)}"
        yield Placed(name, model.count, model.num_threads, model.device, remark)


def _gpus(group: EngineGroupOptions | RewardModelOptions) -> str:
    if group.addresses:
        return ", running already"
    spec = ENGINES.spec(group.backend)
    size = None if group.device == "cpu" or Capability.EMBEDDED in spec.capabilities else spec.size(group)
    if size is None:
        return ""
    over = f" over {size.node_counts[0]} nodes" if size.node_counts[0] > 1 else ""
    return f", {counted(size.num_gpus, 'GPU')} each{over}"
