"""Trials: small runs with every knob and every fault drawn from one integer.

Invariants:

* A trial is a pure function of the policy and its seed, so a seed reproduces a failure exactly.
* Every trial can complete: what it draws never makes a run impossible (no retry budget of nothing with failing
  engines that kill the run, no filter that turns everything away).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.options import StalenessOptions
from penstock.actors.buffer.policies import BUILTIN, BuiltinPolicy, RankedGroup
from penstock.actors.filter.options import FilterOptions
from penstock.actors.prompt_source.options import PromptSourceOptions
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.backends.data.options import DataOptions
from penstock.backends.draws import mixed, uniform
from penstock.backends.engines.options import EnginesOptions, LatencyOptions, SamplingOptions
from penstock.backends.engines.simulated import SimulatedEngine
from penstock.backends.learners.options import LearnerOptions, SimulatedLearnerOptions
from penstock.backends.rewards.options import RewardOptions
from penstock.backends.rewards.simulated import JudgingModel
from penstock.backends.simulated import open_simulated
from penstock.messages.names import (
    BUFFER,
    FILTER,
    LEARNER,
    PROMPT_SOURCE,
    SCORER,
    WEIGHT_PUBLISHER,
    role_of,
)
from penstock.messages.training import OnStale, UpdateMode
from penstock.runtime.hosts.virtual.faults import Fault, FaultKind
from penstock.runtime.hosts.virtual.host import HostSettings
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.process import Casting, Player
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from penstock.runtime.options import RunOptions, RuntimeOptions
from penstock.runtime.scenario import Scenario
from penstock.runtime.wiring import RunPlan, actor_names, build_machine, engine_names, hears, inbox_union

if TYPE_CHECKING:
    from typing import Any

    from penstock.backends.protocol import Backend
    from penstock.backends.timers import Timers

REPLACED: Final = (PROMPT_SOURCE, SCORER, FILTER, WEIGHT_PUBLISHER)
MAX_TOKENS: Final = 48
PROGRESS_TOKENS: Final = 8


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
    num_slots: int = 4
    num_rows: int = 1000
    num_epochs: int | None = None
    target_outstanding: int | None = None
    max_concurrent: int | None = None
    over_sampling: float = 1.0
    publish_every: int = 1
    max_requeues: int = 1
    on_failed_sample: Literal["refill", "shrink", "reject"] = "refill"
    drop_zero_spread: bool = False
    num_retries: int = 2
    max_engine_losses: int = 5
    lease_timeout_s: float = 40.0
    announce_fraction: float = 0.5
    judging: JudgingModel = JudgingModel()
    latency: LatencyOptions = LatencyOptions(
        response_tokens_median=12.0, prefill_s=0.05, token_s=0.05, apply_weights_s=0.2, fetch_weights_s=0.3
    )
    learner: SimulatedLearnerOptions = SimulatedLearnerOptions(publish_s=0.2)
    link: LinkModel = LinkModel()
    supervision: SupervisionModel = SupervisionModel()
    bad_weights_rate: float = 0.0
    """Share of engine incarnations whose first fetch, or first swap, goes wrong."""
    turn_s: float = 0.0
    faults: tuple[Fault, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return actor_names(self.scenario)

    @property
    def engines(self) -> tuple[str, ...]:
        return engine_names(self.scenario)

    @property
    def loses_nothing(self) -> bool:
        """Whether every message between two live processes arrives, and in order."""
        kinds = (FaultKind.CUT, FaultKind.DROP, FaultKind.REORDER)
        return not (self.link.drop or self.link.reorder or any(fault.kind in kinds for fault in self.faults))

    @property
    def is_quick(self) -> bool:
        """Whether, besides, nothing is on its way for longer than a census takes."""
        kinds = (FaultKind.DELAY, FaultKind.STOP)
        is_delayed = any(fault.kind in kinds for fault in self.faults)
        return self.loses_nothing and self.link.max_delay_s <= 0.01 and not is_delayed

    @property
    def host(self) -> HostSettings:
        """What the host is told."""
        return HostSettings(
            seed=self.seed, link=self.link, supervision=self.supervision, turn_s=self.turn_s, validate=True
        )

    @property
    def plan(self) -> RunPlan:
        """What the actors are told."""
        return RunPlan(scenario=self.scenario, run_id="trial", run_folder="", model_folder="", num_rows=self.num_rows)

    @property
    def scenario(self) -> Scenario:
        """As a user would write it."""
        return Scenario(
            run=RunOptions(name="trial", seed=self.seed, num_steps=self.num_steps),
            data=DataOptions(path="lines:1000", num_epochs=self.num_epochs),
            sampling=SamplingOptions(samples_per_group=self.samples_per_group, max_response_tokens=MAX_TOKENS),
            reward=RewardOptions(timeout_s=2.0),
            filter=FilterOptions(
                drop_zero_spread=self.drop_zero_spread,
                function="trial.py:judge" if self.judging.rejection_rate else None,
                on_failed_sample=self.on_failed_sample,
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
                over_sampling=self.over_sampling,
                max_requeues=self.max_requeues,
                max_rejected_batches=1000,
            ),
            engines=EnginesOptions(
                backend="simulated",
                count=self.num_engines,
                slots=self.num_slots,
                progress_tokens=PROGRESS_TOKENS,
                simulated=self.latency,
            ),
            learner=LearnerOptions(
                backend="simulated",
                groups_per_batch=self.groups_per_batch,
                publish_every=self.publish_every,
                simulated=self.learner,
            ),
            weights=WeightsOptions(
                stage_timeout_s=90.0,
                commit_timeout_s=90.0,
                drain_timeout_s=900.0,
                announce_fraction=self.announce_fraction,
                max_failed_publishes=1000,
            ),
            prompt_source=PromptSourceOptions(
                num_retries=self.num_retries,
                max_engine_losses=self.max_engine_losses,
                lease_timeout_s=self.lease_timeout_s,
            ),
            runtime=RuntimeOptions(),
        )

    # --- who plays whom ---------------------------------------------------------------------------------------

    def casting(self) -> Casting:
        """Who plays whom in this trial."""
        plan = self.plan

        def cast(name: str, epoch: int, timers: Timers) -> Player:
            machine = build_machine(name, plan, epoch=epoch)
            if isinstance(machine, Buffer) and self.rank != "policy":
                machine.policy = self._ranked_policy()
            backend = self._backend(name, plan.scenario, epoch, timers)
            return Player(machine=machine, hears=hears(name), inbox=inbox_union(name), backend=backend)

        return cast

    def _backend(self, name: str, scenario: Scenario, epoch: int, timers: Timers) -> Backend[Any] | None:
        if name in (BUFFER, WEIGHT_PUBLISHER):
            return None
        backend = open_simulated(
            role_of(name),
            engines=scenario.engines,
            learner=scenario.learner,
            max_response_tokens=MAX_TOKENS,
            seed=self.seed,
            epoch=epoch,
            timers=timers,
            judging=self.judging,
        )
        if isinstance(backend, SimulatedEngine):
            self._spoil(backend, (self.seed, int(name.split("/")[1]), epoch))
        return backend

    def _spoil(self, engine: SimulatedEngine, where: tuple[int, int, int]) -> None:
        if uniform(*where, 0) >= self.bad_weights_rate:
            return
        if uniform(*where, 1) < 0.5:
            engine.corrupt_fetches = 1
        else:
            engine.corrupt_swaps = 1

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


# --- drawing ------------------------------------------------------------------------------------------------------


def draw_trial(policy: str, seed: int) -> Trial:
    """The trial of this policy with this seed."""
    rng = random.Random(f"{policy} {seed}")
    eta = rng.randint(1, 8) if policy == "fully_async" else BUILTIN[policy].max_staleness
    groups_per_batch = rng.randint(1, 4)
    num_steps = rng.randint(3, 6)
    num_engines = rng.randint(1, 4)
    weather = rng.choice(("calm", "calm", "slow", "rough"))
    trial = Trial(
        seed=seed,
        policy=policy,
        max_staleness=eta,
        update_mode=rng.choice(BUILTIN[policy].update_modes),
        on_stale=OnStale.WAIT if rng.random() < 0.55 else rng.choice(list(OnStale)),
        rank=rng.choice(("policy", "policy", "newest", "shortest", "shuffled")),
        num_steps=num_steps,
        groups_per_batch=groups_per_batch,
        samples_per_group=rng.randint(2, 4),
        num_engines=num_engines,
        num_slots=rng.randint(1, 6),
        num_rows=rng.choice((3, 17, 1000)),
        num_epochs=rng.randint(1, 4) if rng.random() < 0.15 else None,
        target_outstanding=_maybe(rng, 0.4, lambda: rng.randint(groups_per_batch, 9 * groups_per_batch)),
        max_concurrent=_maybe(rng, 0.25, lambda: rng.randint(1, 2 * groups_per_batch)),
        over_sampling=rng.choice((1.25, 1.5, 2.0)) if rng.random() < 0.2 else 1.0,
        publish_every=rng.randint(1, min(3, eta + 1)),
        max_requeues=rng.randint(0, 2),
        on_failed_sample=rng.choice(("refill", "shrink", "reject")),
        drop_zero_spread=rng.random() < 0.2,
        num_retries=rng.randint(0, 2),
        announce_fraction=rng.choice((0.01, 0.5, 1.0)),
        judging=_draw_judging(rng),
        latency=_draw_latency(rng),
        learner=SimulatedLearnerOptions(
            step_s=rng.choice((0.2, 1.0, 4.0)), publish_s=rng.choice((0.05, 1.0)), jitter_sigma=rng.choice((0.0, 0.8))
        ),
        link=_draw_link(rng, weather),
        supervision=_draw_supervision(rng),
        turn_s=rng.choice((0.0, 0.0, 0.001, 0.2)),
        bad_weights_rate=0.2 if rng.random() < 0.1 else 0.0,
    )
    return msgspec.structs.replace(trial, faults=_draw_faults(rng, trial, weather))


def _maybe(rng: random.Random, share: float, draw: Any) -> Any:  # noqa: ANN401 - hands on what ``draw`` returns
    return draw() if rng.random() < share else None


def _draw_link(rng: random.Random, weather: str) -> LinkModel:
    """``calm``: quick and safe; ``slow``: safe; ``rough``: with loss, doubles and overtaking as well."""
    longest_s = 0.002 if weather == "calm" else rng.choice((0.002, 0.2, 2.0, 9.0))
    is_rough = weather == "rough"
    return LinkModel(
        min_delay_s=0.0005,
        max_delay_s=longest_s,
        drop=0.005 if is_rough and rng.random() < 0.6 else 0.0,
        duplicate=0.1 if is_rough and rng.random() < 0.5 else 0.0,
        reorder=0.2 if is_rough and rng.random() < 0.5 else 0.0,
        through_codec=rng.random() < 0.1,
    )


def _draw_judging(rng: random.Random) -> JudgingModel:
    return JudgingModel(
        latency_s=rng.choice((0.01, 0.5)),
        success_rate=0.5,
        failure_rate=0.15 if rng.random() < 0.25 else 0.0,
        hang_rate=0.05 if rng.random() < 0.15 else 0.0,
        rejection_rate=0.3 if rng.random() < 0.25 else 0.0,
    )


def _draw_latency(rng: random.Random) -> LatencyOptions:
    return LatencyOptions(
        response_tokens_median=rng.choice((6.0, 14.0)),
        response_tokens_sigma=rng.choice((0.3, 1.2)),
        prefill_s=0.05,
        token_s=rng.choice((0.02, 0.1)),
        token_load_s=rng.choice((0.0, 0.01)),
        apply_weights_s=rng.choice((0.05, 2.0)),
        fetch_weights_s=rng.choice((0.05, 3.0)),
        failure_rate=0.15 if rng.random() < 0.25 else 0.0,
    )


def _draw_supervision(rng: random.Random) -> SupervisionModel:
    return SupervisionModel(
        heartbeat_timeout_s=10.0,
        max_restarts=1000,
        start_s=rng.choice((0.1, 3.0)),
        notice_s=rng.choice((0.01, 10.0)),
        announce_s=rng.choice((0.005, 0.005, 5.0)),
    )


def _draw_faults(rng: random.Random, trial: Trial, weather: str) -> tuple[Fault, ...]:
    num_faults = rng.choice((0, 1, 1, 2, 3, 5))
    span_s = trial.num_steps * (trial.learner.step_s + 2.0 + 3 * trial.link.max_delay_s)
    kinds: tuple[str, ...] = ("kill", "kill", "kill_within", "kill_within", "stop_short", "stop_long", "slow")
    if weather == "rough":
        kinds = (*kinds, "link", "link", "link")
    return tuple(_draw_fault(rng, trial, rng.choice(kinds), rng.uniform(0.0, span_s)) for _ in range(num_faults))


def _draw_fault(rng: random.Random, trial: Trial, kind: str, at_s: float) -> Fault:
    replaced = rng.choice((*REPLACED, PROMPT_SOURCE, rng.choice(trial.engines), rng.choice(trial.engines)))
    match kind:
        case "kill":
            return Fault(at_s=at_s, kind=FaultKind.KILL, target=replaced)
        case "kill_within":
            return Fault(at_s=at_s, kind=FaultKind.KILL, target=replaced, after_effects=rng.randint(0, 8))
        case "stop_short":
            target = rng.choice(trial.names)
            return Fault(at_s=at_s, kind=FaultKind.STOP, target=target, duration_s=rng.uniform(0.1, 9.0))
        case "stop_long":
            zombie, duration_s = rng.random() < 0.7, 10 + rng.expovariate(0.2)
            return Fault(at_s=at_s, kind=FaultKind.STOP, target=replaced, duration_s=duration_s, as_zombie=zombie)
        case "slow":
            target = rng.choice((*trial.engines, LEARNER, SCORER))
            return Fault(at_s=at_s, kind=FaultKind.SLOW, target=target, amount=5.0, duration_s=rng.uniform(1.0, 30.0))
        case _:
            return _draw_link_fault(rng, trial, at_s)


def _draw_link_fault(rng: random.Random, trial: Trial, at_s: float) -> Fault:
    kinds = (FaultKind.CUT, FaultKind.DROP, FaultKind.DUPLICATE, FaultKind.REORDER, FaultKind.DELAY)
    kind = rng.choice(kinds)
    sender = rng.choice(trial.names)
    peer = rng.choice([name for name in trial.names if name != sender]) if rng.random() < 0.7 else ""
    amount = rng.uniform(1.0, 9.0) if kind is FaultKind.DELAY else rng.uniform(0.2, 0.6)
    return Fault(at_s=at_s, kind=kind, target=sender, peer=peer, amount=amount, duration_s=rng.uniform(0.5, 20.0))
