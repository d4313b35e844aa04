"""Which backend each name stands for; the machines are in :mod:`penstock.runtime.run.wiring`.

What a backend runs on is imported when it is opened: an actor's process loads what it needs and nothing else.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from penstock.backends.data.options import PUSHED
from penstock.backends.engines.options import group_of, options_of
from penstock.backends.engines.passing_on import PassingOn, pass_on
from penstock.backends.engines.spec import (
    ENGINES,
    EngineContext,
    RewardModelContext,
    TeacherContext,
    are_modelled,
    capabilities_of,
)
from penstock.backends.learners.spec import LEARNERS, LearnerContext
from penstock.backends.ledger.backend import LedgerBackend
from penstock.backends.processes.user_environment import pass_variables
from penstock.backends.protocol import Capability
from penstock.messages.names import (
    BUFFER,
    LEARNER,
    Role,
    engine_index,
    is_engine,
    is_reward_model,
    is_teacher,
    role_of,
    teacher_index,
)
from penstock.runtime.run.choosing import choosing_settings
from penstock.runtime.run.own_judges import judging
from penstock.runtime.run.placement import has_nodes_of_its_own, on_learners_devices
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.media_rules import image_rules
from penstock.runtime.scenario.recorded_rules import recorded_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.data.pushed.reading import PushReader
    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.learners.plan import PackedDemonstration
    from penstock.backends.ledger.evaluation_answers import AnswerFiles
    from penstock.backends.ledger.kept_samples import SampleKeeper
    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.processes.remote_ranks import RemoteRanks
    from penstock.backends.protocol import Backend, Timers
    from penstock.messages.samples import Prompt
    from penstock.runtime.run.plan import RunPlan


def open_backend(
    name: str,
    plan: RunPlan,
    *,
    epoch: int = 0,
    timers: Timers | None = None,
    store: LedgerStore | None = None,
    host: str = "127.0.0.1",
    remote_ranks: RemoteRanks | None = None,
    takes_over: bool = False,
) -> Backend[Any] | None:
    """What carries out the commands of this actor, not started yet; None for an actor that has no such commands.

    ``timers`` is the clock of simulated backends; a scenario without such needs none. ``store`` is the ledger, for the
    Buffer; ``host`` this machine's address as other processes of the run see it; ``remote_ranks`` the other nodes of an
    engine or a learner that lies over several; ``takes_over`` says that an engine may go on with a server that the
    incarnation before it has left.
    """
    scenario = plan.scenario
    pass_variables(scenario.runtime.pass_env)
    if name == BUFFER:
        assert store is not None, "the Buffer reads from its ledger"
        keeps = scenario.run.keep_samples or scenario.run.only == "rollout"
        archive = Path(plan.run_folder) / "samples" if keeps else None
        return LedgerBackend(store, archive, _answers(plan))
    if is_engine(name):
        return _engine(name, plan, epoch, timers, host, remote_ranks, takes_over=takes_over)
    if is_teacher(name):
        return _teacher(name, plan, epoch, timers)
    if is_reward_model(name):
        return _reward_model(name, plan, host)
    if name == LEARNER:
        return _learner(plan, epoch, timers, host, remote_ranks)
    if role_of(name) is Role.WEIGHT_PUBLISHER:
        return None
    if are_modelled(scenario.engines):
        return _modelled(name, plan, epoch, timers)
    return _rows_and_rewards(name, plan)


def keeps_samples(plan: RunPlan) -> bool:
    """Whether samples of all fates are kept as text; simulated ones say nothing."""
    scenario = plan.scenario
    return scenario.observability.samples > 0 and bool(plan.model_folder) and not are_modelled(scenario.engines)


def _keeper(plan: RunPlan) -> SampleKeeper | None:
    if not keeps_samples(plan):
        return None
    from penstock.backends.ledger.kept_samples import SampleKeeper

    return SampleKeeper(Path(plan.run_folder), Path(plan.model_folder), plan.scenario.observability.samples)


def _answers(plan: RunPlan) -> AnswerFiles | None:
    """Where answers of evaluations are written; simulated ones say nothing."""
    if not plan.scenario.evaluation.datasets or not plan.model_folder:
        return None
    from penstock.backends.ledger.evaluation_answers import AnswerFiles

    return AnswerFiles(Path(plan.run_folder), Path(plan.model_folder))


def _modelled(name: str, plan: RunPlan, epoch: int, timers: Timers | None) -> Backend[Any]:
    """Rows and rewards beside modelled engines."""
    from penstock.backends.simulated.opening import open_simulated
    from penstock.backends.simulated.rewards import JudgingModel

    assert timers is not None, "simulated backends need a clock"
    scenario = plan.scenario
    return open_simulated(
        role_of(name),
        engines=scenario.engines,
        learner=scenario.learner,
        max_response_tokens=scenario.sampling.max_response_tokens,
        seed=scenario.run.seed,
        epoch=epoch,
        timers=timers,
        choosing=choosing_settings(plan),
        judging=JudgingModel(**asdict(scenario.reward.simulated)),
    )


def _teacher(name: str, plan: RunPlan, epoch: int, timers: Timers | None) -> Backend[Any]:
    scenario, options = plan.scenario, plan.scenario.teacher
    assert options is not None, "a scenario without teachers has no actor of this role"
    spec = ENGINES.spec(options.backend).teacher
    assert spec is not None, "a scenario's rules ask for one that teaches"
    return spec.open(
        TeacherContext(
            name=name,
            index=teacher_index(name),
            epoch=epoch,
            model_folder=Path(plan.teacher_folder),
            run_folder=Path(plan.run_folder),
            options=options,
            max_context=scenario.model.max_context,
            temperature=scenario.sampling.temperature or 1.0,
            seed=scenario.run.seed,
            timers=timers,
        )
    )


def _reward_model(name: str, plan: RunPlan, host: str) -> Backend[Any]:
    options = plan.scenario.reward_model
    assert options is not None, "a scenario without reward models has no actor of this role"
    spec = ENGINES.spec(options.backend).reward_model
    assert spec is not None, "a scenario's rules ask for one that scores"
    folder = Path(options.path)
    return spec.open(
        RewardModelContext(name=name, model_folder=folder, run_folder=Path(plan.run_folder), options=options, host=host)
    )


def _engine(
    name: str,
    plan: RunPlan,
    epoch: int,
    timers: Timers | None,
    host: str,
    remote_ranks: RemoteRanks | None,
    *,
    takes_over: bool,
) -> Backend[Any]:
    """The engine; behind the episodes that the scenario wants, where it generates text."""
    scenario, index = plan.scenario, engine_index(name)
    group, place = group_of(scenario.engines, index)
    options = options_of(scenario.engines, index)
    spec = ENGINES.spec(group.backend)
    judges = judging(name, plan, host) if Capability.EMBEDDED in spec.capabilities else None
    samplings = [each.sampling for each in sets_of(scenario)]
    lora = scenario.learner.lora
    if judges is not None:
        options = replace(options, slots=options.slots + judges.num_slots)
        samplings += judges.samplings
    engine = spec.open(
        EngineContext(
            name=name,
            place=place,
            epoch=epoch,
            model_folder=Path(plan.model_folder),
            run_folder=Path(plan.run_folder),
            options=options,
            sampling=scenario.sampling,
            by_dataset=samplings,
            data=scenario.data,
            recorded=recorded_settings(scenario),
            max_context=scenario.model.max_context,
            dtype=scenario.model.dtype,
            true_on_policy=scenario.learner.true_on_policy,
            lora=None if lora is None or lora.publish == "merged" else lora,
            seed=scenario.run.seed,
            bucket_size_bytes=scenario.weights.bucket_size_bytes,
            sleeps=name in on_learners_devices(scenario),
            remote_ranks=remote_ranks,
            takes_over=takes_over,
            timers=timers,
        )
    )
    passes_on = pass_on(scenario.engines, transport=plan.transport, fan_out=scenario.weights.fan_out)
    if Capability.HOLDS_WEIGHTS in spec.capabilities and passes_on:
        from penstock.backends.weights.network import LANDING

        engine = PassingOn(engine, LANDING, engine=name, host=host)
    if Capability.GENERATES not in spec.capabilities:
        return engine
    if judges is not None:
        from penstock.backends.episodes.judge_endpoint.backend import JudgingEngine
        from penstock.backends.episodes.judge_endpoint.server import JudgeServer

        engine = JudgingEngine(
            engine, JudgeServer(judges), num_slots=judges.num_slots, canary_tolerance=judges.canary_tolerance
        )
    return _with_episodes(name, plan, epoch, engine)


def _with_episodes(name: str, plan: RunPlan, epoch: int, engine: Backend[Any]) -> Backend[Any]:
    from penstock.backends.episodes import EpisodeContext, open_episodes

    scenario = plan.scenario
    group, _ = group_of(scenario.engines, engine_index(name))
    return open_episodes(
        engine,
        EpisodeContext(
            engine=name,
            epoch=epoch,
            run_folder=Path(plan.run_folder),
            model_folder=Path(plan.model_folder),
            max_context=scenario.model.max_context,
            options=scenario.episode,
            sampling=scenario.sampling,
            data=scenario.data,
            evaluated=[each.generate for each in sets_of(scenario)],
            can=capabilities_of(group),
            images=image_rules(scenario, plan.run_folder),
        ),
    )


def _learner(
    plan: RunPlan, epoch: int, timers: Timers | None, host: str, remote_ranks: RemoteRanks | None
) -> Backend[Any]:
    from penstock.backends.learners.plan import ExportPlan, LearnerPlan
    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
    from penstock.runtime.run.plan import log_name

    scenario, folder = plan.scenario, Path(plan.run_folder)

    def log_path(who: str, number: int) -> Path:
        return folder / log_name(f"{LEARNER}-{who}{number}", epoch)

    further = None
    if remote_ranks is not None and has_nodes_of_its_own(scenario):
        further = FurtherNodes(remote_ranks, partial(log_path, "node"))
    return LEARNERS.spec(scenario.learner.backend).open(
        LearnerContext(
            plan=LearnerPlan(
                model_folder=plan.model_folder,
                checkpoints_folder=str(folder / "checkpoints"),
                options=scenario.learner,
                temperature=scenario.sampling.temperature or 1.0,
                dtype=scenario.model.dtype,
                seed=scenario.run.seed,
                num_steps=scenario.run.num_steps,
                max_context=scenario.model.max_context,
                epoch=epoch,
                export=ExportPlan(
                    transport=plan.transport,
                    run_id=plan.run_id,
                    folder=str(folder / "weights"),
                    host=host,
                    names_function=scenario.weights.names_function,
                    quantizes=scenario.engines.quantization is not None,
                    options=scenario.weights.options,
                ),
                demonstrations=_demonstrations(plan),
            ),
            log_path=log_path,
            further=further,
            timers=timers,
        )
    )


def _demonstrations(plan: RunPlan) -> tuple[PackedDemonstration, ...] | None:
    """For the warm start; None where there is none."""
    scenario, warm_start = plan.scenario, plan.scenario.learner.warm_start
    if warm_start is None:
        return None
    from penstock.backends.data.demonstrations import load_demonstrations
    from penstock.backends.learners.plan import pack_demonstrations

    demonstrations = load_demonstrations(
        warm_start.path,
        scenario.data.prompt_key,
        warm_start.response_key,
        Path(plan.model_folder),
        seed=scenario.run.seed,
        chat_template=scenario.data.chat_template,
        template_arguments=scenario.data.template_arguments,
        system_prompt=scenario.data.system_prompt,
        max_tokens=scenario.model.max_context,
    )
    return pack_demonstrations(demonstrations)


def _choosing(plan: RunPlan, prompts: Backend[Any], prompt_of: Callable[[int], Prompt]) -> Backend[Any]:
    """The same backend, or, where rows are chosen, one that chooses them as well."""
    options, settings = plan.scenario.prompt_source, choosing_settings(plan)
    if settings is None:
        return prompts
    from penstock.backends.rewards.row_choosing import ChoosingPrompts
    from penstock.backends.rewards.sampling import PriorityFunction

    priority = None if options.priority is None else PriorityFunction(options.priority, options.priority_timeout_s)
    return ChoosingPrompts(prompts, settings, prompt_of=prompt_of, priority=priority)


def _own_source(plan: RunPlan, keeps_messages: bool) -> Backend[Any]:
    """Of rows that a class of the user's makes."""
    from penstock.backends.data.own_source.backend import open_own_source
    from penstock.runtime.run.rows import image_intake

    scenario, model_folder, run_folder = plan.scenario, Path(plan.model_folder), Path(plan.run_folder)
    return open_own_source(
        scenario.data,
        model_folder,
        run_folder,
        seed=scenario.run.seed,
        max_context=scenario.model.max_context,
        keeps_messages=keeps_messages,
        images=image_intake(scenario, model_folder, run_folder),
    )


def _pushes(plan: RunPlan) -> Backend[Any]:
    """Of groups that come finished from outside."""
    from penstock.backends.episodes.pushes import PushBackend

    scenario, model_folder = plan.scenario, Path(plan.model_folder)
    settings = recorded_settings(scenario)
    assert settings is not None, "a scenario's rules ask for engines that answer from rows"

    def reader() -> PushReader:
        from penstock.backends.data.pushed.reading import open_reader

        return open_reader(scenario.data, settings, model_folder, max_context=scenario.model.max_context)

    return PushBackend(Path(plan.run_folder), scenario.episode.host, reader)


def _with_evaluation(plan: RunPlan, prompts: Backend[Any], *, keeps_messages: bool) -> Backend[Any]:
    """The same backend, or, where there is an evaluation, one that has its prompts as well."""
    if not plan.scenario.evaluation.datasets:
        return prompts
    from penstock.backends.evaluation.prompts import PromptsWithEvaluation
    from penstock.runtime.run.rows import read_evaluation

    datasets = read_evaluation(
        plan.scenario, Path(plan.model_folder), keeps_messages=keeps_messages, run_folder=Path(plan.run_folder)
    )
    return PromptsWithEvaluation(prompts, datasets)


def _surroundings(plan: RunPlan, max_response_tokens: int) -> Surroundings:
    """What reward functions have to know of the run."""
    from penstock.backends.engines.surroundings import Surroundings

    teacher, engines = plan.scenario.teacher, plan.scenario.engines
    return Surroundings(
        max_response_tokens=max_response_tokens,
        run_folder=plan.run_folder,
        engine_addresses=engines.addresses if engines.router is None else (engines.router,),
        teacher_addresses=() if teacher is None else teacher.addresses,
    )


def _rows_and_rewards(name: str, plan: RunPlan) -> Backend[Any] | None:
    scenario, model_folder = plan.scenario, Path(plan.model_folder)
    match role_of(name):
        case Role.PROMPT_SOURCE:
            from penstock.backends.data.backend import DatasetBackend
            from penstock.runtime.run.rows import read_dataset

            keeps_messages = scenario.episode.kind != "single" or scenario.reward_model is not None
            run_folder = Path(plan.run_folder)
            if scenario.data.source is not None:
                is_pushed = scenario.data.source == PUSHED
                source = _pushes(plan) if is_pushed else _own_source(plan, keeps_messages)
                return _with_evaluation(plan, source, keeps_messages=keeps_messages)
            rows = read_dataset(scenario, model_folder, keeps_messages=keeps_messages, run_folder=run_folder)
            prompts = _choosing(plan, DatasetBackend(rows), lambda row: rows.prompt(row, 0))
            prompts = _with_evaluation(plan, prompts, keeps_messages=keeps_messages)
            if not scenario.data.stream:
                return prompts
            from penstock.backends.data.streamed import BackgroundRows, StreamedRows

            assert isinstance(rows, StreamedRows), "asked for above"
            return BackgroundRows(prompts, rows)
        case Role.SCORER:
            from penstock.backends.evaluation.rewards import open_evaluation_rewards
            from penstock.backends.rewards import open_rewards

            limit = scenario.sampling.max_response_tokens
            return open_evaluation_rewards(
                scenario.reward,
                limit,
                sets_of(scenario),
                lambda options, tokens: open_rewards(options, model_folder, _surroundings(plan, tokens)),
            )
        case _:
            from penstock.backends.rewards import open_filters

            options, keeper = scenario.filter, _keeper(plan)
            functions = (options.function, options.sample_function, options.all_samples_hook)
            return open_filters(*functions, model_folder, keeper)
