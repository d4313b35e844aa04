"""Trials: small runs whose every knob and fault is one field, made from the same wiring as real runs.

Invariants:

* A trial says everything: the same trial gives the same run, event for event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.options import StalenessOptions
from penstock.actors.buffer.policies import BuiltinPolicy, RankedGroup
from penstock.actors.filter.options import FilterOptions
from penstock.actors.prompt_source.options import PromptSourceOptions
from penstock.actors.prompt_source.order import PromptOrder
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.backends.data.options import DataOptions
from penstock.backends.draws import mixed
from penstock.backends.engines.options import (
    EngineGroupOptions,
    EnginesOptions,
    LatencyOptions,
    SamplingOptions,
    engines_kept,
)
from penstock.backends.engines.teacher_options import TeacherLatencyOptions, TeacherOptions
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.evaluation.options import EvaluationDataset, EvaluationOptions
from penstock.backends.learners.options import LearnerOptions, SimulatedLearnerOptions
from penstock.backends.ledger.backend import LedgerBackend
from penstock.backends.rewards.options import RewardAlarmOptions, RewardOptions
from penstock.backends.simulated.engine import SimulatedEngine
from penstock.backends.simulated.learner import SimulatedLearner
from penstock.backends.simulated.opening import open_simulated
from penstock.backends.simulated.rewards import JudgingModel
from penstock.backends.simulated.teacher import SimulatedTeacher
from penstock.messages.ledger import EPOCHS_PER_DRIVE
from penstock.messages.names import (
    BUFFER,
    SCORER,
    WEIGHT_PUBLISHER,
    engine_index,
    is_engine,
    is_teacher,
    role_of,
    teacher_index,
)
from penstock.messages.rows import ReplayOptions, RowSource
from penstock.messages.training import OnStale, UpdateMode
from penstock.runtime.hosts.virtual.host import HostSettings
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.process import Casting, Player
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from penstock.runtime.run.choosing import choosing_settings
from penstock.runtime.run.placement import sharing_devices
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import (
    actor_names,
    build_machine,
    engine_names,
    hears,
    inbox_union,
    open_backend,
    teacher_names,
)
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.run_options import RunOptions, RuntimeOptions
from penstock.runtime.shell.engine_scaling import scaling_of
from trials.episodes import EpisodicEngine
from trials.fan_out import Parts, PassingEngine
from trials.faults import Fault, FaultKind
from trials.faulty_engine import FaultyEngine, Where
from trials.late_gpus import GpuTrial
from trials.misfits import FaultyLearner, FaultyTeacher, SlowArchive
from trials.requests import Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Backend, Timers

MAX_TOKENS: Final = 48
PROGRESS_TOKENS: Final = 8
LONG_RESPONSES: Final = LatencyOptions(
    response_tokens_median=48.0, response_tokens_sigma=0.0, prefill_s=0.05, token_s=0.5, fetch_weights_s=0.3
)
"""Every response has 48 tokens and takes 24 s; eight of them are reported at a time."""
OVERDUE_AFTER_S: Final = 60.0
CANARY_TOLERANCE: Final = 0.05


class EvaluationTrial(msgspec.Struct, frozen=True, kw_only=True):
    """When a trial evaluates, and on what."""

    every: int | None = None
    before_first: bool = False
    at_end: bool = False
    pinned: bool = False
    max_running: int | None = None
    num_rows: tuple[int, ...] = (3,)
    """Of each dataset."""
    samples_per_prompt: tuple[int, ...] = (1,)
    scores_groups: bool | None = None
    """Its reward function scores whole groups; None: as that of training."""


class RowChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are chosen in one drive of a run."""

    has_priority: bool = False
    replay: ReplayOptions | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one small run."""

    seed: int
    policy: str
    max_staleness: int
    update_mode: UpdateMode
    on_stale: OnStale = OnStale.WAIT
    rank: str = "policy"
    """``policy``: that of the policy; others are those of users, see :class:`RankedPolicy`."""
    num_steps: int = 4
    groups_per_batch: int = 2
    samples_per_group: int = 2
    num_engines: int = 2
    num_recorded: int = 0
    """Engines beside these for rows that hold their responses: about half of them, then."""
    max_engines: int | None = None
    """So many at most when engines join and leave, one of these at least; None: they do not."""
    num_lent: int = 0
    """Of ``max_engines``, the last so many live on the learner's devices and take them while it waits."""
    lend_after_s: float = 1.0
    scale_hold_s: float | None = None
    """Of ``engines.scale: by_bound``; None: only an operator changes them."""
    num_late: int = 0
    """Of all engines, the weights of the last so many are on their way for longer."""
    late_fetch_s: float = 0.0
    gpus: GpuTrial | None = None
    """Engines that join and have to wait for their GPUs."""
    num_slots: int = 4
    colocated: bool = False
    """Learner and engines share their devices, and take turns."""
    num_rows: int = 1000
    num_epochs: int | None = None
    own_source: bool = False
    """A class makes the rows, and is told what became of them."""
    target_outstanding: int | None = None
    max_concurrent: int | None = None
    over_sampling: float = 1.0
    publish_every: int = 1
    save_every: int = 2
    keep_checkpoints: int = 2
    max_requeues: int = 1
    reuse: int = 1
    on_failed_sample: Literal["refill", "shrink", "reject"] = "refill"
    scores_groups: bool = False
    drop_zero_spread: bool = False
    keep_when_insufficient: int | None = None
    drop_samples: Literal["before_statistics", "after_statistics"] | None = None
    """None: no function judges samples."""
    shows_groups: bool = False
    mask_old_tokens: bool = False
    has_priority: bool = False
    replay: ReplayOptions | None = None
    row_choices: tuple[RowChoice, ...] = ()
    """With which the run goes on each time that the machine was lost, in turn."""
    sources: tuple[RowSource, ...] = ()
    """Of a mixture; ``num_rows`` are those of all together."""
    num_retries: int = 2
    own_retries: tuple[int, ...] = ()
    """That about half of the rows say themselves, each one of these."""
    save_share: float | None = None
    """Of the turns of an episode, after which it is saved; None: a sample is one generation."""
    max_engine_losses: int = 5
    lease_timeout_s: float = 40.0
    routing: str = "prefix_affine"
    max_load: float = 1.5
    announce_fraction: float = 0.5
    judging: JudgingModel = JudgingModel()
    latency: LatencyOptions = LatencyOptions(
        response_tokens_median=12.0, prefill_s=0.05, token_s=0.05, apply_weights_s=0.2, fetch_weights_s=0.3
    )
    learner: SimulatedLearnerOptions = SimulatedLearnerOptions(publish_s=0.2)
    link: LinkModel = LinkModel()
    supervision: SupervisionModel = SupervisionModel()
    only: Literal["evaluate"] | None = None
    """It trains nothing."""
    evaluation: EvaluationTrial | None = None
    num_teachers: int = 0
    teacher_slots: int = 4
    teacher_latency: TeacherLatencyOptions = TeacherLatencyOptions()
    misfit_rate: float = 0.0
    """Share of the teachers' answers that lack a token."""
    silence_rate: float = 0.0
    """Share of them that never come."""
    passes_on: bool = False
    """Engines pass weights on to each other."""
    bad_weights_rate: float = 0.0
    """Share of the fetches, and of the swaps, that go wrong."""
    bad_exports_rate: float = 0.0
    """Share of the publishes that no engine finds right."""
    archive_s: float | None = None
    """How long an archive of trained samples takes; None: none are kept."""
    hang_rate: float = 0.0
    """Share of attempts that stand still at their engine."""
    step_timeout_s: float = 3600.0
    """Of the Learner, for whatever its backend does."""
    turn_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    stops_s: tuple[float, ...] = ()
    """When the run is stopped; it is resumed each time."""
    requests: tuple[Request, ...] = ()
    """Of an operator."""

    @property
    def names(self) -> tuple[str, ...]:
        return actor_names(self.scenario)

    @property
    def engines(self) -> tuple[str, ...]:
        return engine_names(self.scenario)

    @property
    def teachers(self) -> tuple[str, ...]:
        return teacher_names(self.scenario)

    @property
    def loses_nothing(self) -> bool:
        """Whether every message between two live processes arrives, and in order."""
        kinds = (FaultKind.CUT, FaultKind.DROP, FaultKind.REORDER)
        return not (self.link.drop or self.link.reorder or any(fault.kind in kinds for fault in self.faults))

    @property
    def has_notices(self) -> bool:
        """Whether machines of engines are taken."""
        return any(fault.kind is FaultKind.NOTICE for fault in self.faults)

    @property
    def is_quick(self) -> bool:
        """Whether, besides, nothing is on its way, or waits for a turn, for longer than a census takes."""
        kinds = (FaultKind.DELAY, FaultKind.STOP)
        is_delayed = any(fault.kind in kinds for fault in self.faults)
        return self.loses_nothing and max(self.link.max_delay_s, self.turn_s) <= 0.01 and not is_delayed

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens for which an actor would have to be replaced."""
        are_wrong = self.bad_weights_rate or self.bad_exports_rate or self.hang_rate
        return self.loses_nothing and not (self.faults or are_wrong or self.num_teachers)

    @property
    def chooses_rows(self) -> bool:
        """Whether the first drive does."""
        return self.has_priority or self.replay is not None or self.own_source

    @property
    def order(self) -> PromptOrder:
        """Rows by their place in the stream of prompts."""
        sources = self.sources or (RowSource(name="", num_rows=self.num_rows),)
        return PromptOrder(sources, seed=self.seed, shuffle=DataOptions().shuffle and not self.own_source)

    def in_drive(self, drive: int) -> Trial:
        """As the scenario is from the start on (0), or after the machine was lost so often."""
        if not drive or not self.row_choices:
            return self
        choice = self.row_choices[(drive - 1) % len(self.row_choices)]
        return msgspec.structs.replace(self, has_priority=choice.has_priority, replay=choice.replay)

    @property
    def host(self) -> HostSettings:
        """What the host is told."""
        return HostSettings(
            seed=self.seed,
            link=self.link,
            supervision=msgspec.structs.replace(
                self.supervision,
                fewest_engines=engines_kept(self.scenario.engines),
                shares_devices=sharing_devices(self.scenario),
            ),
            overdue_after_s=OVERDUE_AFTER_S,
            turn_s=self.turn_s,
            scaling=scaling_of(self.scenario.engines),
            validate=True,
        )

    @property
    def plan(self) -> RunPlan:
        """What the actors are told."""
        return RunPlan(
            scenario=self.scenario,
            run_id="trial",
            run_folder="",
            model_folder="",
            num_rows=self.num_rows,
            sources=self.sources,
            num_evaluation_prompts=() if self.evaluation is None else self.evaluation.num_rows,
        )

    @property
    def scenario(self) -> Scenario:
        """As a user would write it."""
        return Scenario(
            run=RunOptions(
                name="trial",
                seed=self.seed,
                num_steps=self.num_steps,
                only=self.only,
                keep_samples=self.archive_s is not None,
            ),
            data=DataOptions(
                path=None if self.own_source else "lines:1000",
                source="trial.py:Rows" if self.own_source else None,
                num_epochs=self.num_epochs,
            ),
            sampling=SamplingOptions(samples_per_group=self.samples_per_group, max_response_tokens=MAX_TOKENS),
            reward=self._reward(per_group=self.scores_groups),
            filter=FilterOptions(
                drop_zero_spread=self.drop_zero_spread,
                function="trial.py:judge" if self.judging.rejection_rate else None,
                on_failed_sample=self.on_failed_sample,
                sample_function=None if self.drop_samples is None else "trial.py:sift",
                drop_samples=self.drop_samples or "before_statistics",
                all_samples_hook="trial.py:look" if self.shows_groups else None,
                keep_when_insufficient=self.keep_when_insufficient,
                max_refills=2,
                min_group_size=1,
            ),
            staleness=StalenessOptions(
                policy=self.policy,
                max_staleness=self.max_staleness,
                update_mode=self.update_mode,
                on_stale=self.on_stale,
                target_outstanding=self.target_outstanding or "auto",
                max_concurrent=self.max_concurrent,
                mask_old_tokens=self.mask_old_tokens,
                over_sampling=self.over_sampling,
                max_requeues=self.max_requeues,
                reuse=self.reuse,
                max_rejected_batches=1000,
            ),
            engines=EnginesOptions(
                backend="simulated",
                count=self.num_engines,
                slots=self.num_slots,
                min=None if self.max_engines is None else 1,
                max=self.max_engines,
                lent=self.num_lent,
                lend_after_s=self.lend_after_s,
                scale="fixed" if self.scale_hold_s is None else "by_bound",
                scale_hold_s=self.scale_hold_s or 60.0,
                more=self._recorded,
                placement="colocate" if self.colocated else "auto",
                progress_tokens=PROGRESS_TOKENS,
                simulated=self.latency,
            ),
            learner=LearnerOptions(
                backend="simulated",
                groups_per_batch=self.groups_per_batch,
                save_every=self.save_every,
                keep_checkpoints=self.keep_checkpoints,
                step_timeout_s=self.step_timeout_s,
                simulated=self.learner,
            ),
            teacher=self._teacher,
            evaluation=self._evaluation,
            weights=WeightsOptions(
                canary_tolerance=CANARY_TOLERANCE,
                publish_every=self.publish_every,
                stage_timeout_s=90.0,
                commit_timeout_s=90.0,
                drain_timeout_s=900.0,
                announce_fraction=self.announce_fraction,
                max_failed_publishes=1000,
            ),
            prompt_source=PromptSourceOptions(
                routing=self.routing,
                max_load=self.max_load,
                num_retries=self.num_retries,
                max_engine_losses=self.max_engine_losses,
                lease_timeout_s=self.lease_timeout_s,
                priority="trial.py:prefer" if self.has_priority else None,
                priority_candidates=8,
                replay=self.replay,
            ),
            episode=EpisodeOptions(kind="single" if self.save_share is None else "function"),
            runtime=RuntimeOptions(),
        )

    def _reward(self, *, per_group: bool) -> RewardOptions:
        """Where engines are drawn to fail often, a run whose first samples all fail goes on."""
        alarms = RewardAlarmOptions(stop_after=0) if self.latency.failure_rate else RewardAlarmOptions()
        return RewardOptions(timeout_s=2.0, per_group=per_group, alarms=alarms)

    @property
    def _recorded(self) -> tuple[EngineGroupOptions, ...]:
        if not self.num_recorded:
            return ()
        return (EngineGroupOptions(backend="recorded", count=self.num_recorded, slots=self.num_slots),)

    @property
    def _evaluation(self) -> EvaluationOptions:
        trial = self.evaluation
        if trial is None:
            return EvaluationOptions()
        return EvaluationOptions(
            every=trial.every,
            before_first=trial.before_first,
            at_end=trial.at_end,
            pinned=trial.pinned,
            max_running=trial.max_running,
            datasets=tuple(
                EvaluationDataset(
                    name=f"set{index}",
                    path="lines:1000",
                    samples_per_prompt=samples,
                    reward=None if trial.scores_groups is None else self._reward(per_group=trial.scores_groups),
                )
                for index, samples in enumerate(trial.samples_per_prompt)
            ),
        )

    @property
    def _teacher(self) -> TeacherOptions | None:
        if not self.num_teachers:
            return None
        return TeacherOptions(
            backend="simulated",
            count=self.num_teachers,
            slots=self.teacher_slots,
            timeout_s=20.0,
            start_timeout_s=30.0,
            simulated=self.teacher_latency,
        )

    # --- who plays whom ---------------------------------------------------------------------------------------

    def casting(
        self,
        has_recorded_rows: Callable[[], bool] = lambda: False,
        archived: Callable[[int], None] = lambda _: None,
    ) -> Casting:
        """Who plays whom in this trial; ``has_recorded_rows``: whether the ledger has any; ``archived`` is told the
        steps whose samples were archived."""
        first_plan = self.plan
        parts: Parts = set()

        def cast(name: str, epoch: int, timers: Timers, store: LedgerStore | None) -> Player:
            drive, plan = epoch // EPOCHS_PER_DRIVE, first_plan
            if drive and self.row_choices:  # what the ledger has of rows stays as it is for as long as it matters
                plan = msgspec.structs.replace(self.in_drive(drive).plan, has_recorded_rows=has_recorded_rows())
            records, kept = ((), None) if store is None else (store.entries(), store.kept_books())
            machine = build_machine(name, plan, epoch=epoch, records=records, kept=kept)
            if isinstance(machine, Buffer) and self.rank != "policy" and machine.books.policy_recorded is None:
                machine.books.policy = self._ranked_policy()
            backend = self._backend(name, plan, epoch, timers, store)
            if self.archive_s is not None and isinstance(backend, LedgerBackend):
                assert store is not None, "the Buffer has one"
                backend = SlowArchive(backend, store.reader(), timers, self.archive_s, archived)
            if self.passes_on and isinstance(backend, SimulatedEngine | FaultyEngine | EpisodicEngine):
                backend = PassingEngine(backend, f"{name} {epoch}", parts, timers)
            return Player(machine=machine, hears=hears(name), inbox=inbox_union(name), backend=backend)

        return cast

    def _backend(
        self, name: str, plan: RunPlan, epoch: int, timers: Timers, store: LedgerStore | None
    ) -> Backend[Any] | None:
        if name in (BUFFER, WEIGHT_PUBLISHER):
            plain = msgspec.structs.replace(plan.scenario.run, keep_samples=False)  # on no disk
            scenario = msgspec.structs.replace(plan.scenario, run=plain)
            return open_backend(name, msgspec.structs.replace(plan, scenario=scenario), epoch=epoch, store=store)
        scenario, judging = plan.scenario, self.judging
        if name == SCORER and epoch % 2:  # a function may have an answer for one Scorer that it had not for another
            judging = msgspec.structs.replace(judging, failure_rate=0.0, hang_rate=0.0)
        backend = open_simulated(
            role_of(name),
            engines=self._engines_of(name),
            learner=scenario.learner,
            max_response_tokens=MAX_TOKENS,
            seed=self.seed,
            epoch=epoch,
            timers=timers,
            judging=judging,
            teacher=scenario.teacher,
            index=teacher_index(name) if is_teacher(name) else 0,
            own_retries=self.own_retries,
            choosing=choosing_settings(plan),
        )
        if isinstance(backend, SimulatedEngine):
            engine = self._faulty(backend, (self.seed, engine_index(name), epoch))
            return engine if self.save_share is None else EpisodicEngine(engine, self.save_share)
        if isinstance(backend, SimulatedLearner) and self.bad_exports_rate:
            return FaultyLearner(backend, (self.seed, epoch), self.bad_exports_rate)
        if isinstance(backend, SimulatedTeacher) and (self.misfit_rate or self.silence_rate):
            where = self.seed, teacher_index(name), epoch
            return FaultyTeacher(backend, where, misfit_rate=self.misfit_rate, silence_rate=self.silence_rate)
        return backend

    def _engines_of(self, name: str) -> EnginesOptions:
        options = self.scenario.engines
        first_late = (self.max_engines or self.num_engines) - self.num_late
        if not self.num_late or not is_engine(name) or engine_index(name) < first_late:
            return options
        return msgspec.structs.replace(options, simulated_fetch_s=self.late_fetch_s)

    def _faulty(self, engine: SimulatedEngine, where: Where) -> SimulatedEngine | FaultyEngine:
        if not (self.bad_weights_rate or self.hang_rate):
            return engine
        return FaultyEngine(engine, where, bad_weights_rate=self.bad_weights_rate, hang_rate=self.hang_rate)

    def _ranked_policy(self) -> RankedPolicy:
        return RankedPolicy(
            max_staleness=self.max_staleness, update_mode=self.update_mode, on_stale=self.on_stale, order=self.rank
        )


class RankedPolicy(BuiltinPolicy, frozen=True, kw_only=True):
    """What users may do: any order at all."""

    order: str

    def rank(self, group: RankedGroup) -> tuple[int, ...]:
        """``newest`` first, ``shortest`` first, or ``shuffled``."""
        match self.order:
            case "newest":
                return (-group.group_id,)
            case "shortest":
                return (group.num_tokens,)
            case _:
                return (mixed(group.group_id),)
