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
from penstock.actors.buffer.pacing import PacingSettings
from penstock.actors.buffer.policies import BUILTIN, BuiltinPolicy, RankedGroup, builtin_policy
from penstock.actors.buffer.settings import BufferSettings
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.actors.filter.machine import Filter
from penstock.actors.filter.settings import FilterSettings
from penstock.actors.learner.machine import Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.prompt_source.settings import PromptSourceSettings
from penstock.actors.scorer.machine import Scorer
from penstock.actors.scorer.settings import ScorerSettings
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.backends.draws import mixed, uniform
from penstock.backends.engines.options import EnginesOptions, LatencyOptions
from penstock.backends.engines.simulated import SimulatedEngine
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.learners.simulated import SimulatedLearner
from penstock.backends.rewards.simulated import JudgingModel, SimulatedJudge, SimulatedPrompts, SimulatedScorer
from penstock.messages import inboxes
from penstock.messages.names import (
    BUFFER,
    FILTER,
    LEARNER,
    PROMPT_SOURCE,
    SCORER,
    WEIGHT_PUBLISHER,
    engine_name,
    is_engine,
)
from penstock.messages.training import OnStale, UpdateMode
from penstock.runtime.hosts.virtual.faults import Fault, FaultKind
from penstock.runtime.hosts.virtual.host import HostSettings
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.process import Player
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from penstock.runtime.shell import classes_of

if TYPE_CHECKING:
    from typing import Any

    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.backends.timers import Timers

REPLACED: Final = (PROMPT_SOURCE, SCORER, FILTER, WEIGHT_PUBLISHER)
ROLES: Final = (PROMPT_SOURCE, SCORER, FILTER, BUFFER, LEARNER, WEIGHT_PUBLISHER)
UNIONS: Final[dict[str, tuple[Any, Any]]] = {
    PROMPT_SOURCE: (inboxes.PromptSourceEvent, inboxes.PromptSourceWire | inboxes.LeasesAsked),
    SCORER: (inboxes.ScorerEvent, inboxes.ScorerWire),
    FILTER: (inboxes.FilterEvent, inboxes.FilterWire),
    BUFFER: (inboxes.BufferEvent, inboxes.BufferWire | inboxes.SamplesSettled),
    LEARNER: (inboxes.LearnerEvent, inboxes.LearnerWire),
    WEIGHT_PUBLISHER: (inboxes.WeightPublisherEvent, inboxes.WeightPublisherWire),
    "engine": (inboxes.EngineWorkerEvent, inboxes.EngineWorkerWire),
}
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
    num_prompts: int | None = None
    target_outstanding: int | None = None
    max_concurrent: int | None = None
    over_sampling: float = 1.0
    publish_every: int = 1
    max_requeues: int = 1
    on_failed_sample: Literal["refill", "shrink", "reject"] = "refill"
    drop_zero_spread: bool = False
    num_retries: int = 2
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
    faults: tuple[Fault, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(engine_name(index) for index in range(self.num_engines))

    @property
    def names(self) -> tuple[str, ...]:
        return (*ROLES, *self.engines)

    @property
    def host(self) -> HostSettings:
        """What the host is told."""
        return HostSettings(seed=self.seed, link=self.link, supervision=self.supervision, validate=True)

    # --- who plays whom ---------------------------------------------------------------------------------------

    def cast(self, name: str, epoch: int, timers: Timers) -> Player:
        """A :class:`penstock.runtime.hosts.virtual.process.Casting`."""
        event, wire = UNIONS["engine" if is_engine(name) else name]
        machine, backend = self._engine(name, epoch, timers) if is_engine(name) else self._role(name, epoch, timers)
        return Player(machine=machine, hears=classes_of(event), inbox=wire, backend=backend)

    def _engine(self, name: str, epoch: int, timers: Timers) -> tuple[Any, Any]:
        options = EnginesOptions(slots=self.num_slots, progress_tokens=PROGRESS_TOKENS, simulated=self.latency)
        backend = SimulatedEngine(options, max_response_tokens=MAX_TOKENS, timers=timers)
        where = (self.seed, int(name.split("/")[1]), epoch)
        if self.bad_weights_rate and uniform(*where, 0) < self.bad_weights_rate:
            if uniform(*where, 1) < 0.5:
                backend.corrupt_fetches = 1
            else:
                backend.corrupt_swaps = 1
        return EngineWorker(EngineWorkerSettings(name=name, epoch=epoch)), backend

    def _role(self, name: str, epoch: int, timers: Timers) -> tuple[Any, Any]:
        match name:
            case "prompt_source":
                backend = SimulatedPrompts(seed=self.seed, prompt_tokens=4, latency_s=0.01, timers=timers)
                return PromptSource(self._prompt_source(epoch)), backend
            case "scorer":
                scorer = Scorer(ScorerSettings(timeout_s=2.0, num_retries=1, grace_s=5.0))
                return scorer, SimulatedScorer(self.judging, seed=self.seed, timers=timers)
            case "filter":
                return Filter(self._filter()), SimulatedJudge(self.judging, seed=self.seed, timers=timers)
            case "buffer":
                return Buffer(self._buffer(), self.staleness_policy()), None
            case "learner":
                learner = Learner(LearnerSettings(epoch=epoch, publish_every=self.publish_every, step_timeout_s=600.0))
                return learner, SimulatedLearner(self.learner, seed=self.seed, epoch=epoch, timers=timers)
            case _:
                return WeightPublisher(self._weight_publisher()), None

    def _prompt_source(self, epoch: int) -> PromptSourceSettings:
        return PromptSourceSettings(
            epoch=epoch,
            seed=self.seed,
            num_rows=self.num_rows,
            shuffle=True,
            samples_per_group=self.samples_per_group,
            num_retries=self.num_retries,
            max_engine_losses=5,
            lease_timeout_s=40.0,
            census_timeout_s=2.0,
        )

    def _filter(self) -> FilterSettings:
        return FilterSettings(
            drop_zero_spread=self.drop_zero_spread,
            min_response_tokens=0,
            max_response_tokens=None,
            has_function=self.judging.rejection_rate > 0,
            on_failed_sample=self.on_failed_sample,
            max_refills=2,
            min_group_size=1,
            judge_timeout_s=5.0,
        )

    def _buffer(self) -> BufferSettings:
        pacing = PacingSettings(
            num_steps=self.num_steps,
            groups_per_batch=self.groups_per_batch,
            target_outstanding=self.target_outstanding,
            engine_capacity_groups=max(1, self.num_engines * self.num_slots // self.samples_per_group),
            max_concurrent=self.max_concurrent,
            over_sampling=self.over_sampling,
        )
        return BufferSettings(
            pacing=pacing,
            samples_per_group=self.samples_per_group,
            engines=self.engines,
            num_prompts=self.num_prompts,
            publish_every=self.publish_every,
            max_requeues=self.max_requeues,
            max_rejected_batches=1000,
            settle_delay_s=0.1,
        )

    def _weight_publisher(self) -> WeightPublisherSettings:
        return WeightPublisherSettings(
            stage_timeout_s=90.0,
            commit_timeout_s=90.0,
            drain_timeout_s=900.0,
            announce_fraction=self.announce_fraction,
            check_canary=True,
            canary_tolerance=0.05,
            max_failed_publishes=1000,
        )

    def staleness_policy(self) -> StalenessPolicy:
        """As the Buffer is given it."""
        if self.rank == "policy":
            return builtin_policy(
                self.policy,
                max_staleness=self.max_staleness,
                update_mode=self.update_mode,
                on_stale=self.on_stale,
            )
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
    link = _draw_link(rng)
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
        num_prompts=rng.randint(1, groups_per_batch * num_steps) if rng.random() < 0.1 else None,
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
        link=link,
        supervision=_draw_supervision(rng),
        bad_weights_rate=0.2 if rng.random() < 0.1 else 0.0,
    )
    return msgspec.structs.replace(trial, faults=_draw_faults(rng, trial))


def _maybe(rng: random.Random, share: float, draw: Any) -> Any:  # noqa: ANN401 - hands on what ``draw`` returns
    return draw() if rng.random() < share else None


def _draw_link(rng: random.Random) -> LinkModel:
    longest_s = rng.choice((0.002, 0.002, 0.2, 2.0, 9.0))
    return LinkModel(
        min_delay_s=0.0005,
        max_delay_s=longest_s,
        drop=0.005 if rng.random() < 0.25 else 0.0,
        duplicate=0.1 if rng.random() < 0.2 else 0.0,
        reorder=0.2 if rng.random() < 0.2 else 0.0,
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
        backoff_s=rng.choice((0.05, 0.5)),
    )


def _draw_faults(rng: random.Random, trial: Trial) -> tuple[Fault, ...]:
    num_faults = rng.choice((0, 0, 1, 1, 2, 3, 5))
    span_s = trial.num_steps * (trial.learner.step_s + 2.0 + 3 * trial.link.max_delay_s)
    return tuple(_draw_fault(rng, trial, rng.uniform(0.0, span_s)) for _ in range(num_faults))


def _draw_fault(rng: random.Random, trial: Trial, at_s: float) -> Fault:
    replaced = rng.choice((*REPLACED, *trial.engines, *trial.engines))
    match rng.choice(("kill", "kill", "kill_within", "stop_short", "stop_long", "slow", "link", "link")):
        case "kill":
            return Fault(at_s=at_s, kind=FaultKind.KILL, target=replaced)
        case "kill_within":
            return Fault(at_s=at_s, kind=FaultKind.KILL, target=replaced, after_effects=rng.randint(0, 8))
        case "stop_short":
            target = rng.choice(trial.names)
            return Fault(at_s=at_s, kind=FaultKind.STOP, target=target, duration_s=rng.uniform(0.1, 9.0))
        case "stop_long":
            zombie, duration_s = rng.random() < 0.7, rng.uniform(10.5, 60.0)
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
    return Fault(
        at_s=at_s, kind=kind, target=sender, peer=peer, amount=amount, duration_s=rng.uniform(0.5, 20.0)
    )
