"""Which machine and which backend each name stands for. The only place where the parts of a run are put together.

Both hosts build every actor here, so what runs on the virtual clock is what runs on GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.pacing import PacingSettings
from penstock.actors.buffer.policies import BUILTIN, builtin_policy
from penstock.actors.buffer.settings import BufferSettings, ElasticEngines
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.reward_model import RewardModel
from penstock.actors.engine_worker.settings import EngineWorkerSettings, TeacherSettings
from penstock.actors.engine_worker.teacher import Teacher
from penstock.actors.filter.machine import Filter
from penstock.actors.filter.settings import FilterSettings
from penstock.actors.learner.machine import Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.prompt_source.order import PromptOrder
from penstock.actors.prompt_source.settings import PromptSourceSettings
from penstock.actors.scorer.machine import Scorer
from penstock.actors.scorer.settings import GRACE_S, ScorerSettings
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.backends.data.options import PUSHED
from penstock.backends.engines.options import (
    are_elastic,
    fewest_engines,
    group_of,
    lent_engines,
    most_engines,
    num_engines,
    num_slots,
)
from penstock.backends.engines.spec import are_modelled, capabilities_of, some_can
from penstock.backends.protocol import Capability
from penstock.backends.rewards.functions_asked import longest_timeout_s, num_workers, scores_groups
from penstock.backends.rewards.sampling_calls import SAMPLE_TIMEOUT_S
from penstock.messages import inboxes
from penstock.messages.ledger import RunRecorded
from penstock.messages.names import (
    BUFFER,
    LEARNER,
    Role,
    engine_index,
    engine_name,
    reward_model_name,
    role_of,
    teacher_name,
)
from penstock.messages.rows import RowSource
from penstock.messages.samples import Purpose
from penstock.runtime.run.collecting import collected_groups, collecting_pacing, collecting_policy, goal_of
from penstock.runtime.run.evaluating import evaluation_schedule, max_evaluating
from penstock.runtime.run.open_backend import keeps_samples
from penstock.runtime.run.open_backend import open_backend as open_backend
from penstock.runtime.run.own_routing import routing_of
from penstock.runtime.run.placement import on_learners_devices
from penstock.runtime.run.plan import RunPlan as RunPlan  # noqa: TC001 - a process of the Ray host asks this module for it
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.shell.shell import classes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.machine import Machine
    from penstock.messages.base import Event
    from penstock.messages.books import KeptBooks
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.scenario import Scenario


_INBOXES: Final[Mapping[Role, tuple[Any, Any]]] = {
    Role.PROMPT_SOURCE: (inboxes.PromptSourceWire, inboxes.PromptSourceEvent),
    Role.ENGINE_WORKER: (inboxes.EngineWorkerWire, inboxes.EngineWorkerEvent),
    Role.SCORER: (inboxes.ScorerWire, inboxes.ScorerEvent),
    Role.FILTER: (inboxes.FilterWire, inboxes.FilterEvent),
    Role.BUFFER: (inboxes.BufferWire, inboxes.BufferEvent),
    Role.LEARNER: (inboxes.LearnerWire, inboxes.LearnerEvent),
    Role.WEIGHT_PUBLISHER: (inboxes.WeightPublisherWire, inboxes.WeightPublisherEvent),
    Role.TEACHER: (inboxes.TeacherWire, inboxes.TeacherEvent),
    Role.REWARD_MODEL: (None, inboxes.RewardModelEvent),
}


def actor_names(scenario: Scenario) -> tuple[str, ...]:
    """Every actor of a run, those that take longest to start first. Recorded batches need nobody who makes any."""
    if scenario.run.only == "learner":
        return (LEARNER, BUFFER)
    singles = (Role.LEARNER, Role.BUFFER, Role.PROMPT_SOURCE, Role.SCORER, Role.FILTER, Role.WEIGHT_PUBLISHER)
    learner, *others = (role.value for role in singles)
    return (learner, *engine_names(scenario), *teacher_names(scenario), *reward_model_names(scenario), *others)


def engine_names(scenario: Scenario) -> tuple[str, ...]:
    """The engines of a run."""
    if scenario.run.only == "learner":
        return ()
    return tuple(engine_name(index) for index in range(num_engines(scenario.engines)))


def possible_engines(scenario: Scenario) -> tuple[str, ...]:
    """Those of the start, and those that may join."""
    if scenario.run.only == "learner":
        return ()
    return tuple(engine_name(index) for index in range(most_engines(scenario.engines)))


def possible_actors(scenario: Scenario) -> tuple[str, ...]:
    """Every actor that a run may have."""
    names = actor_names(scenario)
    return (*names, *(name for name in possible_engines(scenario) if name not in names))


def teacher_names(scenario: Scenario) -> tuple[str, ...]:
    """The teachers of a run. Recorded batches have their log-probs already."""
    teacher = scenario.teacher
    if teacher is None or scenario.run.only == "learner":
        return ()
    return tuple(teacher_name(index) for index in range(teacher.count))


def reward_model_names(scenario: Scenario) -> tuple[str, ...]:
    """The reward models of a run. Recorded batches have their rewards already."""
    model = scenario.reward_model
    if model is None or scenario.run.only == "learner":
        return ()
    return tuple(reward_model_name(index) for index in range(model.count))


def recorded_engines(scenario: Scenario) -> tuple[str, ...]:
    """The engines that answer with the responses that rows hold."""
    names = engine_names(scenario)
    can = (capabilities_of(group_of(scenario.engines, index)[0]) for index in range(len(names)))
    return tuple(name for name, each in zip(names, can, strict=True) if Capability.FROM_ROWS in each)


def inbox_union(name: str) -> Any:  # noqa: ANN401 - a type form
    """The union of the events that others may send to this actor."""
    return _INBOXES[role_of(name)][0]


def event_union(name: str) -> Any:  # noqa: ANN401 - a type form
    """The union of the events that this actor's ``handle`` takes."""
    return _INBOXES[role_of(name)][1]


def hears(name: str) -> frozenset[type[Event]]:
    """The classes of events that this actor's ``handle`` takes."""
    return classes_of(event_union(name))


# --- machines -----------------------------------------------------------------------------------------------------


def build_machine(
    name: str, plan: RunPlan, *, epoch: int = 0, records: Iterable[LedgerEntry] = (), kept: KeptBooks | None = None
) -> Machine[Any]:
    """The actor of this name, in its first state; the Buffer in that which the ledger's records give, read as far as
    ``kept`` does not say what they come to.

    Raises:
        UserFault: the records are those of another run.
    """
    match role_of(name):
        case Role.PROMPT_SOURCE:
            return PromptSource(_prompt_source(plan, epoch), routing_of(plan.scenario.prompt_source.routing))
        case Role.ENGINE_WORKER:
            weights = plan.scenario.weights
            assert weights.canary_tolerance is not None, "scenarios are resolved"
            group, _ = group_of(plan.scenario.engines, engine_index(name))
            return EngineWorker(
                EngineWorkerSettings(
                    name=name,
                    epoch=epoch,
                    retracts=Capability.RETRACT in capabilities_of(group),
                    takes_turns=name in on_learners_devices(plan.scenario),
                    is_lent=name in lent_engines(plan.scenario.engines),
                    check_canary=weights.canary and Capability.HOLDS_WEIGHTS in capabilities_of(group),
                    canary_tolerance=weights.canary_tolerance,
                )
            )
        case Role.SCORER:
            return Scorer(_scorer(plan.scenario))
        case Role.TEACHER:
            return Teacher(TeacherSettings(name=name, epoch=epoch))
        case Role.REWARD_MODEL:
            return RewardModel()
        case Role.FILTER:
            return Filter(_filter(plan))
        case Role.BUFFER:
            row_of = _order(plan).row_of if plan.chooses_rows else None
            return Buffer(_buffer(plan), staleness_policy(plan.scenario), records, row_of=row_of, kept=kept)
        case Role.LEARNER:
            options, engines = plan.scenario.learner, plan.scenario.engines
            lend_after_s = engines.lend_after_s if engines.lent else None
            return Learner(
                LearnerSettings(
                    epoch=epoch,
                    publish_every=plan.scenario.weights.publish_every,
                    publishes=plan.scenario.run.only != "learner",
                    save_every=options.save_every,
                    saves_first=options.warm_start is not None,
                    step_timeout_s=options.step_timeout_s,
                    shares_with=_sharing(plan.scenario),
                    lend_after_s=lend_after_s,
                    yield_timeout_s=_yield_timeout_s(plan.scenario),
                )
            )
        case Role.WEIGHT_PUBLISHER:
            return WeightPublisher(_weight_publisher(plan))
        case Role.SUPERVISOR:
            raise ValueError("the supervisor is no actor")


def _sharing(scenario: Scenario) -> tuple[str, ...]:
    """Engines on the learner's devices."""
    return tuple(sorted(on_learners_devices(scenario), key=engine_index))


def _yield_timeout_s(scenario: Scenario) -> float:
    """For engines on the learner's devices to give these up. Those that are lent break off what runs, and are waited
    for only while they open or swap."""
    weights, engines = scenario.weights, scenario.engines
    if not engines.lent:
        return weights.drain_timeout_s
    return max(engines.start_timeout_s, weights.commit_timeout_s)


def staleness_policy(scenario: Scenario) -> StalenessPolicy:
    """The policy that a resolved scenario names, built in or the user's own.

    Raises:
        UserCodeError: the user's file cannot be loaded.
    """
    if collected_groups(scenario) is not None:
        return collecting_policy(scenario)
    options = scenario.staleness
    assert options.max_staleness is not None
    assert options.update_mode is not None
    if options.policy in BUILTIN:
        return builtin_policy(
            options.policy,
            max_staleness=options.max_staleness,
            update_mode=options.update_mode,
            on_stale=options.on_stale,
        )
    from penstock.backends.processes.user_code import load_object

    policy = cast("type[Any]", load_object(options.policy))
    built = policy(max_staleness=options.max_staleness, update_mode=options.update_mode, on_stale=options.on_stale)
    return cast("StalenessPolicy", built)


def _prompt_source(plan: RunPlan, epoch: int) -> PromptSourceSettings:
    scenario = plan.scenario
    return PromptSourceSettings(
        options=scenario.prompt_source,
        epoch=epoch,
        seed=scenario.run.seed,
        num_rows=plan.num_rows,
        shuffle=_shuffles(plan),
        sources=plan.sources,
        chooses_rows=plan.chooses_rows,
        prefetch_rows=scenario.data.prefetch_rows if scenario.data.stream else 0,
        samples_per_group=scenario.sampling.samples_per_group,
        max_evaluating=max_evaluating(scenario),
        salvages_responses=scenario.episode.kind == "single",
        awaits_pushes=scenario.data.source == PUSHED and not are_modelled(scenario.engines),
        recorded_engines=recorded_engines(scenario),
        num_generating=len(engine_names(scenario)) - len(recorded_engines(scenario)),
    )


def _scorer(scenario: Scenario) -> ScorerSettings:
    reward, teacher = scenario.reward, scenario.teacher
    evaluated = [each.reward for each in sets_of(scenario)]
    longest_s = max(longest_timeout_s(block) for block in (reward, *evaluated))
    settings = ScorerSettings(
        timeout_s=reward.timeout_s,
        num_retries=reward.num_retries,
        workers=num_workers(reward),
        grace_s=GRACE_S + max(0.0, longest_s - reward.timeout_s),
        whole_groups=_whole_groups(scenario),
        constant_groups=reward.alarms.constant_groups,
        failed_share=reward.alarms.failed_share,
        failed_window=reward.alarms.failed_window,
        fruitless_calls=reward.alarms.stop_after,
    )
    if teacher is None:
        return settings
    return msgspec.structs.replace(
        settings,
        teachers=teacher_names(scenario),
        teacher_timeout_s=teacher.timeout_s,
        teacher_start_timeout_s=teacher.start_timeout_s,
        max_teacher_losses=teacher.max_losses,
    )


def _whole_groups(scenario: Scenario) -> tuple[Purpose, ...]:
    """Of which purposes a reward function scores whole groups."""
    evaluated = [each.reward for each in sets_of(scenario)]
    return tuple(
        purpose
        for purpose, blocks in ((Purpose.TRAIN, [scenario.reward]), (Purpose.EVALUATE, evaluated))
        if any(map(scores_groups, blocks))
    )


def _filter(plan: RunPlan) -> FilterSettings:
    options, num_samples = plan.scenario.filter, plan.scenario.sampling.samples_per_group
    assert options.drop_zero_spread is not None, "scenarios are resolved"
    return FilterSettings(
        options=msgspec.structs.replace(options, min_group_size=min(options.min_group_size, num_samples)),
        tells_scorer=bool(_whole_groups(plan.scenario)),
        keeps_samples=keeps_samples(plan),
        judge_timeout_s=60.0 if options.sample_function is None else 60.0 + SAMPLE_TIMEOUT_S * num_samples,
    )


def _buffer(plan: RunPlan) -> BufferSettings:
    scenario = plan.scenario
    staleness, num_samples = scenario.staleness, scenario.sampling.samples_per_group
    target = staleness.target_outstanding
    pacing = PacingSettings(
        num_steps=scenario.run.num_steps,
        groups_per_batch=scenario.learner.groups_per_batch,
        target_outstanding=None if isinstance(target, str) else target,
        engine_capacity_groups=-(-num_slots(scenario.engines) // num_samples),
        max_concurrent=staleness.max_concurrent,
        over_sampling=staleness.over_sampling,
    )
    num_epochs = scenario.data.num_epochs
    is_given = scenario.run.only == "learner"  # its groups are in the ledger, whatever the dataset here is
    return BufferSettings(
        pacing=pacing if collected_groups(scenario) is None else collecting_pacing(pacing, scenario),
        goal=goal_of(scenario),
        evaluation=evaluation_schedule(plan),
        samples_per_group=num_samples,
        engines=possible_engines(scenario),
        elastic=_elastic(scenario),
        num_prompts=None if num_epochs is None or is_given else _order(plan).num_prompts(num_epochs),
        policy_name=staleness.policy,
        publish_every=scenario.weights.publish_every,
        max_requeues=staleness.max_requeues,
        max_rejected_batches=staleness.max_rejected_batches,
        max_uses=staleness.reuse,
        stop_after_failures=scenario.reward.alarms.stop_after,
        keep_after_batches=scenario.filter.keep_when_insufficient,
        mask_old_tokens=staleness.mask_old_tokens,
        chooses_rows=plan.chooses_rows,
        tells_row_ends=scenario.data.source is not None,
        settle_delay_s=scenario.runtime.settle_delay_s,
        keep_checkpoints=scenario.learner.keep_checkpoints,
        keep_samples=scenario.run.keep_samples,
        identity=None
        if is_given
        else RunRecorded(
            seed=scenario.run.seed,
            num_rows=plan.num_rows,
            shuffle=_shuffles(plan),
            samples_per_group=num_samples,
            groups_per_batch=scenario.learner.groups_per_batch,
            sources=_mixture(plan.sources),
            data_digest=plan.data_digest,
        ),
    )


def _elastic(scenario: Scenario) -> ElasticEngines | None:
    engines = scenario.engines
    if not are_elastic(engines) or scenario.run.only == "learner":
        return None
    return ElasticEngines(first=engine_names(scenario), fewest=fewest_engines(engines), num_slots=engines.slots)


def _order(plan: RunPlan) -> PromptOrder:
    sources = plan.sources or (RowSource(name="", num_rows=plan.num_rows),)
    return PromptOrder(sources, seed=plan.scenario.run.seed, shuffle=_shuffles(plan))


def _shuffles(plan: RunPlan) -> bool:
    """A class that makes rows has an order of its own."""
    return plan.scenario.data.shuffle and plan.scenario.data.source is None


def _mixture(sources: Sequence[RowSource]) -> str:
    """What has to be the same for groups to mean the same prompts."""
    if len(sources) < 2:
        return ""
    return ", ".join(f"{each.name} {each.num_rows} rows share {each.share}" for each in sources)


def _weight_publisher(plan: RunPlan) -> WeightPublisherSettings:
    return WeightPublisherSettings(
        options=plan.scenario.weights,
        start_timeout_s=plan.scenario.engines.start_timeout_s,
        weightless=recorded_engines(plan.scenario),
        has_models=some_can(plan.scenario.engines, Capability.HOLDS_WEIGHTS),
        share_devices=_sharing(plan.scenario),
        lent=tuple(sorted(lent_engines(plan.scenario.engines), key=engine_index)),
    )
