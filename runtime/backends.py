"""Which backend each name stands for; the machines are in :mod:`penstock.runtime.wiring`.

What a backend runs on is imported when it is opened: an actor's process loads what it needs and nothing else.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.backends.engines.options import group_of, options_of
from penstock.backends.stores.backend import LedgerBackend
from penstock.backends.user_environment import pass_variables
from penstock.messages.names import BUFFER, LEARNER, Role, engine_index, is_engine, is_teacher, role_of, teacher_index
from penstock.runtime.choosing import choosing_settings
from penstock.runtime.hosts.ray.placement import colocated, has_nodes_of_its_own
from penstock.runtime.judging import judging
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.recorded_rules import recorded_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.data.demonstrations import Demonstration
    from penstock.backends.evaluation.answers import AnswerFiles
    from penstock.backends.protocol import Backend
    from penstock.backends.remote_ranks import RemoteRanks
    from penstock.backends.rewards.surroundings import Surroundings
    from penstock.backends.stores.kept_samples import SampleKeeper
    from penstock.backends.stores.protocol import LedgerStore
    from penstock.backends.timers import Timers
    from penstock.messages.samples import Prompt
    from penstock.runtime.plan import RunPlan


def open_backend(
    name: str,
    plan: RunPlan,
    *,
    epoch: int = 0,
    timers: Timers | None = None,
    store: LedgerStore | None = None,
    host: str = "127.0.0.1",
    remote_ranks: RemoteRanks | None = None,
) -> Backend[Any] | None:
    """What carries out the commands of this actor, not started yet; None for an actor that has no such commands.

    ``timers`` is the clock of simulated backends; a scenario without such needs none. ``store`` is the ledger, for the
    Buffer; ``host`` this machine's address as other processes of the run see it; ``remote_ranks`` the other nodes of an
    engine or a learner that lies over several.
    """
    scenario = plan.scenario
    pass_variables(scenario.runtime.pass_env)
    if name == BUFFER:
        assert store is not None, "the Buffer reads from its ledger"
        keeps = scenario.run.keep_samples or scenario.run.only == "rollout"
        archive = Path(plan.run_folder) / "samples" if keeps else None
        return LedgerBackend(store, archive, _answers(plan))
    is_simulated = scenario.engines.backend == "simulated"
    if is_engine(name):
        if is_simulated:
            return _simulated(name, plan, epoch, timers)
        return _episodes(name, plan, epoch, host, remote_ranks)
    if is_teacher(name):
        return _simulated(name, plan, epoch, timers) if is_simulated else _teacher(name, plan)
    if name == LEARNER:
        simulates = scenario.learner.backend == "simulated"
        return _simulated(name, plan, epoch, timers) if simulates else _learner(plan, epoch, host, remote_ranks)
    if role_of(name) is Role.WEIGHT_PUBLISHER:
        return None
    return _simulated(name, plan, epoch, timers) if is_simulated else _rows_and_rewards(name, plan)


def keeps_samples(plan: RunPlan) -> bool:
    """Whether samples of all fates are kept as text; simulated ones say nothing."""
    scenario = plan.scenario
    return scenario.observability.samples > 0 and bool(plan.model_folder) and scenario.engines.backend != "simulated"


def _keeper(plan: RunPlan) -> SampleKeeper | None:
    if not keeps_samples(plan):
        return None
    from penstock.backends.stores.kept_samples import SampleKeeper

    return SampleKeeper(Path(plan.run_folder), Path(plan.model_folder), plan.scenario.observability.samples)


def _answers(plan: RunPlan) -> AnswerFiles | None:
    """Where answers of evaluations are written; simulated ones say nothing."""
    if not plan.scenario.evaluation.datasets or not plan.model_folder:
        return None
    from penstock.backends.evaluation.answers import AnswerFiles

    return AnswerFiles(Path(plan.run_folder), Path(plan.model_folder))


def _simulated(name: str, plan: RunPlan, epoch: int, timers: Timers | None) -> Backend[Any]:
    from penstock.backends.simulated import open_simulated

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
        teacher=scenario.teacher,
        index=teacher_index(name) if is_teacher(name) else 0,
        choosing=choosing_settings(plan),
    )


def _teacher(name: str, plan: RunPlan) -> Backend[Any]:
    scenario, folder = plan.scenario, Path(plan.teacher_folder)
    options = scenario.teacher
    assert options is not None, "a scenario without teachers has no actor of this role"
    if options.backend == "sglang":
        from penstock.backends.engines.sglang.teacher import open_sglang_teacher

        return open_sglang_teacher(
            name=name,
            place=teacher_index(name),
            model_folder=folder,
            run_folder=Path(plan.run_folder),
            options=options,
            max_context=scenario.model.max_context,
        )
    from penstock.backends.engines.torch.teacher import open_torch_teacher

    return open_torch_teacher(
        model_folder=folder,
        options=options,
        max_context=scenario.model.max_context,
        temperature=scenario.sampling.temperature or 1.0,
    )


def _episodes(name: str, plan: RunPlan, epoch: int, host: str, remote_ranks: RemoteRanks | None) -> Backend[Any]:
    """The engine, behind the episodes that the scenario wants."""
    from penstock.backends.episodes import open_episodes

    scenario = plan.scenario
    group, _ = group_of(scenario.engines, engine_index(name))
    if group.backend == "recorded":
        return _recorded(plan, group.slots)
    return open_episodes(
        _engine(name, plan, host, remote_ranks),
        scenario.episode,
        engine=name,
        epoch=epoch,
        run_folder=plan.run_folder,
        model_folder=plan.model_folder,
        max_context=scenario.model.max_context,
        sampling=scenario.sampling,
        data=scenario.data,
        evaluated=[each.generate for each in sets_of(scenario)],
    )


def _recorded(plan: RunPlan, num_slots: int) -> Backend[Any]:
    """It gives responses whole, so no episode is played around it."""
    from penstock.backends.engines.recorded import open_recorded_engine

    scenario, settings = plan.scenario, recorded_settings(plan.scenario)
    assert settings is not None, "this engine is one"
    return open_recorded_engine(
        scenario.data,
        settings,
        model_folder=Path(plan.model_folder),
        num_slots=num_slots,
        seed=scenario.run.seed,
        max_context=scenario.model.max_context,
    )


def _sglang(name: str, plan: RunPlan, remote_ranks: RemoteRanks | None) -> Backend[Any]:
    from penstock.backends.engines.sglang.create import open_sglang_engine

    scenario, index = plan.scenario, engine_index(name)
    return open_sglang_engine(
        name=name,
        place=group_of(scenario.engines, index)[1],
        model_folder=Path(plan.model_folder),
        run_folder=Path(plan.run_folder),
        options=options_of(scenario.engines, index),
        sampling=scenario.sampling,
        max_context=scenario.model.max_context,
        dtype=scenario.model.dtype,
        bucket_size_bytes=scenario.weights.bucket_size_bytes,
        sleeps=name in colocated(scenario),
        remote_ranks=remote_ranks,
        by_dataset=[each.sampling for each in sets_of(scenario)],
    )


def _engine(name: str, plan: RunPlan, host: str, remote_ranks: RemoteRanks | None) -> Backend[Any]:
    if group_of(plan.scenario.engines, engine_index(name))[0].backend == "sglang":
        return _sglang(name, plan, remote_ranks)
    from penstock.backends.engines.torch import open_torch_engine
    from penstock.backends.weights.transports import open_fetcher

    scenario = plan.scenario
    options, judges = options_of(scenario.engines, engine_index(name)), judging(name, plan, host)
    engine = open_torch_engine(
        model_folder=Path(plan.model_folder),
        options=options if judges is None else replace(options, slots=options.slots + judges.num_slots),
        sampling=scenario.sampling,
        max_context=scenario.model.max_context,
        dtype=scenario.model.dtype,
        fetcher=open_fetcher(),
        by_dataset=[*(each.sampling for each in sets_of(scenario)), *(() if judges is None else judges.drawings)],
    )
    if judges is None:
        return engine
    from penstock.backends.engines.judging.opening import open_judging_engine

    return open_judging_engine(engine, judges)


def _learner(plan: RunPlan, epoch: int, host: str, remote_ranks: RemoteRanks | None) -> Backend[Any]:
    """In the process that opens it, or as a gang of processes of its own; megatron-core always, as what it needs where
    there is no CUDA changes torch for a whole process."""
    demonstrations = _demonstrations(plan)
    if plan.scenario.learner.num_ranks > 1 or plan.scenario.learner.backend == "megatron":
        return _gang(plan, epoch, host, demonstrations, remote_ranks)
    from penstock.backends.hooks.weight_names import renamed_exporter
    from penstock.backends.learners.torch.factory import open_torch_learner
    from penstock.backends.weights.transports import open_exporter

    scenario, folder = plan.scenario, Path(plan.run_folder)
    return open_torch_learner(
        model_folder=Path(plan.model_folder),
        checkpoints_folder=folder / "checkpoints",
        options=scenario.learner,
        temperature=scenario.sampling.temperature,
        dtype=scenario.model.dtype,
        seed=scenario.run.seed,
        num_steps=scenario.run.num_steps,
        epoch=epoch,
        exporter=renamed_exporter(
            open_exporter(
                plan.transport, run_id=plan.run_id, learner_epoch=epoch, folder=folder / "weights", host=host
            ),
            scenario.weights.names_function,
        ),
        demonstrations=demonstrations,
    )


def _gang(
    plan: RunPlan,
    epoch: int,
    host: str,
    demonstrations: list[Demonstration] | None,
    remote_ranks: RemoteRanks | None,
) -> Backend[Any]:
    from penstock.backends.learners.gang.open import open_gang_learner
    from penstock.backends.learners.gang.other_nodes import FurtherNodes
    from penstock.backends.learners.gang.plan import ExportPlan
    from penstock.runtime.hosts.ray.boot import log_name

    scenario, folder = plan.scenario, Path(plan.run_folder)

    def log_path(who: str, number: int) -> Path:
        return folder / log_name(f"{LEARNER}-{who}{number}", epoch)

    further = None
    if remote_ranks is not None and has_nodes_of_its_own(scenario):
        further = FurtherNodes(remote_ranks, partial(log_path, "node"))
    return open_gang_learner(
        model_folder=Path(plan.model_folder),
        checkpoints_folder=folder / "checkpoints",
        options=scenario.learner,
        temperature=scenario.sampling.temperature,
        dtype=scenario.model.dtype,
        seed=scenario.run.seed,
        num_steps=scenario.run.num_steps,
        epoch=epoch,
        export=ExportPlan(
            transport=plan.transport,
            run_id=plan.run_id,
            folder=str(folder / "weights"),
            host=host,
            names_function=scenario.weights.names_function,
        ),
        demonstrations=demonstrations,
        log_path=partial(log_path, "rank"),
        further=further,
    )


def _demonstrations(plan: RunPlan) -> list[Demonstration] | None:
    """For the warm start; None where there is none."""
    scenario, warm_start = plan.scenario, plan.scenario.learner.warm_start
    if warm_start is None:
        return None
    from penstock.backends.data.demonstrations import load_demonstrations

    return load_demonstrations(
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


def _choosing(plan: RunPlan, prompts: Backend[Any], prompt_of: Callable[[int], Prompt]) -> Backend[Any]:
    """The same backend, or, where rows are chosen, one that chooses them as well."""
    options, settings = plan.scenario.prompt_source, choosing_settings(plan)
    if settings is None:
        return prompts
    from penstock.backends.data.choosing import ChoosingPrompts
    from penstock.backends.rewards.sampling import PriorityFunction

    priority = None if options.priority is None else PriorityFunction(options.priority, options.priority_timeout_s)
    return ChoosingPrompts(prompts, settings, prompt_of=prompt_of, priority=priority)


def _with_evaluation(plan: RunPlan, prompts: Backend[Any], *, keeps_messages: bool) -> Backend[Any]:
    """The same backend, or, where there is an evaluation, one that has its prompts as well."""
    if not plan.scenario.evaluation.datasets:
        return prompts
    from penstock.backends.evaluation.prompts import PromptsWithEvaluation
    from penstock.runtime.rows import read_evaluation

    datasets = read_evaluation(plan.scenario, Path(plan.model_folder), keeps_messages=keeps_messages)
    return PromptsWithEvaluation(prompts, datasets)


def _surroundings(plan: RunPlan, max_response_tokens: int) -> Surroundings:
    """What reward functions have to know of the run."""
    from penstock.backends.rewards.surroundings import Surroundings

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
            from penstock.runtime.rows import read_dataset

            keeps_messages = scenario.episode.kind != "single"
            run_folder = Path(plan.run_folder)
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
