"""Draws trials: every knob and every fault from one integer.

Invariants:

* A trial is a pure function of the policy and its seed, so a seed reproduces a failure exactly.
* Every trial can complete: what is drawn never makes a run impossible.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.actors.buffer.policies import BUILTIN
from penstock.backends.engines.options import LatencyOptions
from penstock.backends.engines.teacher_options import TeacherLatencyOptions
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.simulated.rewards import JudgingModel
from penstock.messages.names import (
    BUFFER,
    FILTER,
    LEARNER,
    PROMPT_SOURCE,
    SCORER,
    WEIGHT_PUBLISHER,
    engine_index,
    engine_name,
)
from penstock.messages.operator import EnginesAsked, GrantsPaused, PolicyChanged, SaveAsked
from penstock.messages.rows import ReplayOptions, RowSource
from penstock.messages.training import OnStale, UpdateMode
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel
from trials.faults import NEVER, Fault, FaultKind
from trials.late_gpus import GpuTrial
from trials.requests import Request
from trials.trial import EvaluationTrial, RowChoice, Trial

if TYPE_CHECKING:
    from typing import Any

SAMPLES_TRAINED: Final = 24
"""In a trial, about."""
MAX_HITS: Final = 3
"""Of one actor that the run cannot do without, where others are lost more often than it allows."""
SINGLES: Final = (PROMPT_SOURCE, SCORER, FILTER, BUFFER, LEARNER, WEIGHT_PUBLISHER)


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
        save_every=rng.randint(1, 4),
        keep_checkpoints=rng.randint(1, 3),
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
        bad_weights_rate=rng.choice((0.05, 0.2)) if rng.random() < 0.12 else 0.0,
    )
    trial = _bounded(trial)
    faults = _draw_faults(rng, trial, weather)
    routing = rng.choice(("prefix_affine", "prefix_affine", "least_loaded"))
    max_load = rng.choice((1.0, 1.25, 1.5, 3.0))
    trial = msgspec.structs.replace(trial, faults=faults, routing=routing, max_load=max_load)
    trial = _colocate(trial, rng if policy == "sync" else random.Random(f"devices {policy} {seed}"))
    trial = _record(trial, random.Random(f"recorded {policy} {seed}"))
    scores_groups = random.Random(f"groups {policy} {seed}").random() < 0.25
    trial = msgspec.structs.replace(trial, scores_groups=scores_groups)
    trial = _teach(trial, random.Random(f"teachers {policy} {seed}"))
    trial = _control(trial, random.Random(f"sampling {policy} {seed}"))
    trial = _budget(trial, random.Random(f"retries {policy} {seed}"))
    trial = _go_on_otherwise(trial, random.Random(f"choices {policy} {seed}"))
    trial = _mix(trial, random.Random(f"mixture {policy} {seed}"))
    trial = _play(trial, random.Random(f"episodes {policy} {seed}"))
    trial = _evaluate(trial, random.Random(f"evaluation {policy} {seed}"))
    trial = _route(trial, random.Random(f"routing {policy} {seed}"))
    trial = _reuse(trial, random.Random(f"reuse {policy} {seed}"))
    trial = _operate(trial, random.Random(f"requests {policy} {seed}"))
    trial = _scale(trial, random.Random(f"engines {policy} {seed}"))
    trial = _follow_the_bound(trial, random.Random(f"bound {policy} {seed}"))
    trial = _lend(trial, random.Random(f"lending {policy} {seed}"))
    trial = _notice(trial, random.Random(f"notices {policy} {seed}"))
    trial = _pass_on(trial, random.Random(f"fan out {policy} {seed}"))
    trial = _die_slowly(trial, random.Random(f"last processes {policy} {seed}"))
    trial = _delay(trial, random.Random(f"late {policy} {seed}"))
    trial = _wear_out(trial, random.Random(f"worn {policy} {seed}"))
    trial = _train_beside(trial, random.Random(f"digests {policy} {seed}"))
    trial = _await_gpus(trial, random.Random(f"gpus {policy} {seed}"))
    trial = _stand_still(trial, random.Random(f"hangs {policy} {seed}"))
    trial = _stop(trial, random.Random(f"stops {policy} {seed}"))
    trial = _save_slowly(trial, random.Random(f"saving {policy} {seed}"))
    trial = _archive(trial, random.Random(f"archives {policy} {seed}"))
    trial = _misfit(trial, random.Random(f"misfits {policy} {seed}"))
    return _start_slowly(trial, random.Random(f"starts {policy} {seed}"))


def _train_beside(trial: Trial, rng: random.Random) -> Trial:
    """One of four has a learner that trains on while its copy of the weights is looked at, within a step or after
    several, and is often lost meanwhile."""
    if rng.random() >= 0.25:
        return trial
    learner = msgspec.structs.replace(trial.learner, digest_s=rng.choice((0.01, 0.5, 6.0)))
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    faults = tuple(
        Fault(at_s=rng.uniform(0.0, span_s), kind=FaultKind.KILL, target=rng.choice((LEARNER, WEIGHT_PUBLISHER)))
        for _ in range(rng.choice((0, 0, 1, 2)))
    )
    if trial.supervision.max_restarts <= MAX_HITS:  # others may be lost no more often
        faults = ()
    return msgspec.structs.replace(trial, learner=learner, faults=(*trial.faults, *faults))


def _stand_still(trial: Trial, rng: random.Random) -> Trial:
    """One of ten has engines where samples stand still, backends that do not answer for a while, or both."""
    if rng.random() >= 0.1 or trial.supervision.max_restarts <= MAX_HITS:
        return trial
    names = (*trial.engines, *trial.teachers, LEARNER, LEARNER, SCORER, FILTER)
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    freezes = tuple(
        Fault(
            at_s=rng.uniform(0.0, span_s),
            kind=FaultKind.SLOW,
            target=rng.choice(names),
            amount=NEVER,
            duration_s=rng.choice((1.0, 5.0, 20.0)),
        )
        for _ in range(rng.choice((0, 1, 2, 4)))
    )
    # With more noise one step in 100,000 takes longer than it may, and again in every Learner that tries it.
    even = msgspec.structs.replace(trial.learner, jitter_sigma=min(0.3, trial.learner.jitter_sigma))
    return msgspec.structs.replace(
        trial,
        learner=even,
        hang_rate=rng.choice((0.0, 0.05, 0.2)),
        lease_timeout_s=20.0,
        step_timeout_s=120.0,
        faults=(*trial.faults, *freezes),
    )


def _stop(trial: Trial, rng: random.Random) -> Trial:
    """One of ten is stopped, once or twice, and goes on."""
    if rng.random() >= 0.1:
        return trial
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    stops_s = tuple(rng.uniform(0.0, span_s) for _ in range(rng.choice((1, 1, 2))))
    return msgspec.structs.replace(trial, stops_s=stops_s)


def _save_slowly(trial: Trial, rng: random.Random) -> Trial:
    """One of five writes its checkpoints for longer than a step, most of them after each or every second one, so that
    training has to wait for them; it is often lost or stopped meanwhile."""
    if rng.random() >= 0.2 or trial.only is not None:
        return trial
    learner = msgspec.structs.replace(
        trial.learner, snapshot_s=rng.choice((0.0, 0.3, 2.0)), checkpoint_s=rng.choice((0.01, 3.0, 12.0, 40.0))
    )
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    is_hit = rng.random() < 0.6 and trial.supervision.max_restarts > MAX_HITS
    faults = tuple(
        Fault(at_s=rng.uniform(0.0, 1.5 * span_s), kind=FaultKind.KILL, target=rng.choice((LEARNER, LEARNER, BUFFER)))
        for _ in range(rng.choice((1, 1, 2)) if is_hit else 0)
    )
    stops_s = tuple(rng.uniform(0.0, 1.5 * span_s) for _ in range(rng.choice((0, 0, 1, 2))))
    return msgspec.structs.replace(
        trial,
        learner=learner,
        save_every=rng.choice((1, 1, 2, 3)),
        faults=(*trial.faults, *faults),
        stops_s=trial.stops_s or stops_s,
    )


def _archive(trial: Trial, rng: random.Random) -> Trial:
    """One of six keeps what it trained, which is written within a step or over several."""
    if rng.random() >= 1 / 6 or trial.only is not None:
        return trial
    return msgspec.structs.replace(trial, archive_s=rng.choice((0.0, 0.5, 6.0, 30.0)))


def _misfit(trial: Trial, rng: random.Random) -> Trial:
    """One of ten publishes weights that no engine finds right; of three with teachers one has such as answer for other
    tokens, or not at all; of four with episodes one has tools that hang."""
    exports, teachers, tools = rng.random() < 0.1, rng.random() < 1 / 3, rng.random() < 0.25
    rates = rng.choice((0.1, 0.4)), rng.choice(((0.1, 0.0), (0.0, 0.1), (0.2, 0.1))), rng.choice((0.05, 0.2))
    if trial.supervision.max_restarts <= MAX_HITS:
        return trial
    if exports:
        trial = msgspec.structs.replace(trial, bad_exports_rate=rates[0])
    if teachers and trial.num_teachers:
        trial = msgspec.structs.replace(trial, misfit_rate=rates[1][0], silence_rate=rates[1][1])
    if tools and trial.save_share is not None:
        trial = msgspec.structs.replace(trial, hang_rate=rates[2], lease_timeout_s=20.0)
    return trial


def _await_gpus(trial: Trial, rng: random.Random) -> Trial:
    """One of two of those whose engines join and leave has some that wait for their GPUs each time that they are
    started, and some of these in vain. One that does not is always asked for, so the run can complete."""
    most = trial.max_engines or 0
    if rng.random() < 0.5 or most <= trial.num_engines:
        return trial
    joining = [engine_name(index) for index in range(trial.num_engines, most - trial.num_lent)]
    if not joining:
        return trial
    names = tuple(rng.sample(joining, rng.randint(1, len(joining))))
    gpus = GpuTrial(names=names, wait_s=rng.choice((2.0, 10.0, 60.0)), timeout_s=rng.choice((1.0, 8.0, 900.0)))
    return msgspec.structs.replace(trial, gpus=gpus, requests=_asking_for(engine_name(0), trial.requests))


def _start_slowly(trial: Trial, rng: random.Random) -> Trial:
    """One of eight has engines, a learner, or both, that are dear to replace, and so are waited for when they are
    silent; what happens, happens while they start or after it."""
    if rng.random() >= 0.125:
        return trial
    start_s = rng.uniform(20.0, 120.0)
    who = rng.choice(("engines", "learner", "both"))
    late_s = rng.choice((0.0, start_s))
    latency, learner = trial.latency, trial.learner
    if who != "learner":
        latency = msgspec.structs.replace(latency, start_s=start_s)
    if who != "engines":
        learner = msgspec.structs.replace(learner, start_s=start_s)
    return msgspec.structs.replace(
        trial,
        latency=latency,
        learner=learner,
        supervision=msgspec.structs.replace(trial.supervision, heartbeat_timeout_s=3.0),
        faults=tuple(msgspec.structs.replace(fault, at_s=fault.at_s + late_s) for fault in trial.faults),
        requests=tuple(msgspec.structs.replace(each, at_s=each.at_s + late_s) for each in trial.requests),
    )


def _pass_on(trial: Trial, rng: random.Random) -> Trial:
    """One of three with several engines has them pass weights on, some of which take long, or come wrong at first."""
    if rng.random() >= 1 / 3 or trial.colocated or (trial.max_engines or trial.num_engines) < 2:
        return trial
    latency = msgspec.structs.replace(trial.latency, fetch_weights_s=rng.choice((0.05, 0.3, 2.0)))
    rate = 0.3 if rng.random() < 0.3 else trial.bad_weights_rate
    return msgspec.structs.replace(trial, passes_on=True, latency=latency, bad_weights_rate=rate)


def _die_slowly(trial: Trial, rng: random.Random) -> Trial:
    """Where devices are shared, what actors have started there may outlive them by seconds."""
    supervision = msgspec.structs.replace(trial.supervision, end_s=rng.choice((0.0, 0.0, 0.5, 5.0)))
    return msgspec.structs.replace(trial, supervision=supervision)


def _delay(trial: Trial, rng: random.Random) -> Trial:
    """One of four with several engines has some whose weights come late: within a step, or after several."""
    num_engines = trial.max_engines or trial.num_engines
    if rng.random() >= 0.25 or num_engines < 2:
        return trial
    late_fetch_s = rng.choice((1.0, 5.0, 20.0, 60.0))
    return msgspec.structs.replace(trial, num_late=rng.randint(1, num_engines - 1), late_fetch_s=late_fetch_s)


def _wear_out(trial: Trial, rng: random.Random) -> Trial:
    """One of two of those whose engines join and leave has some that die whenever they come, more often than the run
    allows of one actor. Everybody else is hit less often, and one engine is there from the start and always asked
    for, so the run can complete."""
    if rng.random() < 0.5 or trial.max_engines is None or trial.num_teachers:
        return trial  # teachers are replaced for being late, however often
    spared = engine_name(rng.randrange(trial.num_engines) if trial.scale_hold_s is None else 0)
    others = [name for name in map(engine_name, range(trial.max_engines)) if name != spared]
    worn = rng.sample(others, rng.randint(1, len(others)))
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    kills = tuple(
        Fault(at_s=rng.uniform(0.0, span_s), kind=FaultKind.KILL, target=name)
        for name in worn
        for _ in range(rng.choice((6, 12, 24)))
    )
    num_hits: Counter[str] = Counter()
    faults: list[Fault] = []
    for fault in trial.faults:
        num_hits[fault.target] += 1
        if fault.target in worn or fault.kind is FaultKind.MACHINE or num_hits[fault.target] <= MAX_HITS:
            faults.append(fault)
    return msgspec.structs.replace(
        trial,
        faults=(*faults, *kills),
        requests=_asking_for(spared, trial.requests),
        bad_weights_rate=0.0,
        supervision=msgspec.structs.replace(trial.supervision, max_restarts=MAX_HITS),
    )


def _asking_for(name: str, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The same requests, each with this engine where it names engines."""
    return tuple(
        msgspec.structs.replace(each, event=msgspec.structs.replace(each.event, engines=_with(name, each.event)))
        if isinstance(each.event, EnginesAsked)
        else each
        for each in requests
    )


def _with(name: str, asked: EnginesAsked) -> tuple[str, ...]:
    return tuple(sorted({*asked.engines, name}, key=engine_index))


def _notice(trial: Trial, rng: random.Random) -> Trial:
    """One of five has engines whose machines are taken at any moment, with word of it or with next to none."""
    if rng.random() >= 0.2 or trial.colocated or trial.num_recorded:
        return trial
    names = [engine_name(index) for index in range(trial.max_engines or trial.num_engines)]
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    notices = tuple(
        Fault(
            at_s=rng.uniform(0.0, span_s),
            kind=FaultKind.NOTICE,
            target=rng.choice(names),
            duration_s=rng.choice((0.01, 0.5, 5.0, 30.0)),
        )
        for _ in range(rng.choice((1, 1, 2, 4)))
    )
    supervision = msgspec.structs.replace(trial.supervision, max_restarts=100)
    return msgspec.structs.replace(trial, supervision=supervision, faults=(*trial.faults, *notices))


def _scale(trial: Trial, rng: random.Random) -> Trial:
    """One of four has engines that join and leave at any moment, and that die at any moment of it."""
    if rng.random() >= 0.25 or trial.colocated or trial.num_recorded:
        return trial
    most = rng.randint(max(2, trial.num_engines), 5)
    names = [engine_name(index) for index in range(most)]
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    requests = tuple(
        Request(
            at_s=rng.uniform(0.0, span_s), event=EnginesAsked(engines=tuple(rng.sample(names, rng.randint(1, most))))
        )
        for _ in range(rng.choice((1, 2, 2, 4, 8)))
    )
    faults = tuple(_draw_elastic_fault(rng, request, names) for request in requests if rng.random() < 0.5)
    slow = msgspec.structs.replace(trial.latency, token_s=0.2, response_tokens_median=24.0)
    supervision = msgspec.structs.replace(
        trial.supervision, leave_timeout_s=rng.choice((0.01, 0.5, 5.0, 30.0)), max_restarts=100
    )
    return msgspec.structs.replace(
        trial,
        max_engines=most,
        latency=slow if rng.random() < 0.5 else trial.latency,
        supervision=supervision,
        requests=(*trial.requests, *requests),
        faults=(*trial.faults, *faults),
    )


def _follow_the_bound(trial: Trial, rng: random.Random) -> Trial:
    """One of three of those whose engines join and leave has them follow the bound as well, for as many steps as that
    takes."""
    if rng.random() >= 1 / 3 or trial.max_engines is None:
        return trial
    return msgspec.structs.replace(trial, scale_hold_s=rng.choice((0.5, 2.0)), num_steps=12)


def _lend(trial: Trial, rng: random.Random) -> Trial:
    """One of two of those whose engines join and leave has some of these on the learner's devices, and takes long for
    its steps or for its samples; about when such engines come, and at any moment, the learner is lost as well."""
    most = (trial.max_engines or 0) - trial.num_engines
    if rng.random() >= 0.5 or most < 1:
        return trial
    return lending(trial, rng, rng.randint(1, most))


def lending(trial: Trial, rng: random.Random, num_lent: int) -> Trial:
    """The trial with so many of its ``max_engines`` on the learner's devices."""
    latency = msgspec.structs.replace(
        trial.latency,
        sleep_s=rng.choice((0.0, 0.1, 2.0)),
        wake_s=rng.choice((0.0, 0.5)),
        token_s=rng.choice((trial.latency.token_s, 0.2)),
    )
    learner = msgspec.structs.replace(trial.learner, sleep_s=rng.choice((0.0, 0.1)), wake_s=rng.choice((0.0, 0.5)))
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    faults = tuple(
        Fault(at_s=rng.uniform(0.0, span_s), kind=FaultKind.KILL, target=LEARNER)
        for _ in range(rng.choice((0, 0, 1, 2)))
    )
    return msgspec.structs.replace(
        trial,
        num_lent=num_lent,
        lend_after_s=rng.choice((0.01, 0.2, 1.0)),
        latency=latency,
        learner=learner,
        faults=(*trial.faults, *faults),
    )


def _draw_elastic_fault(rng: random.Random, request: Request, names: list[str]) -> Fault:
    """About when engines join or leave: whoever has to do with it dies, stands still, is slow, or is not heard."""
    at_s = max(0.0, request.at_s + rng.choice((-5.0, 0.1, 1.0, 5.0)) * rng.random())
    duration_s = rng.choice((rng.uniform(0.1, 9.0), 10 + rng.expovariate(0.2)))
    match rng.choice(("kill", "kill", "stop", "slow", "cut")):
        case "slow":
            return Fault(at_s=at_s, kind=FaultKind.SLOW, target=rng.choice(names), amount=20.0, duration_s=duration_s)
        case "cut":
            return Fault(at_s=at_s, kind=FaultKind.CUT, target=rng.choice(names), peer=SCORER, duration_s=duration_s)
        case way:
            kind = FaultKind.KILL if way == "kill" else FaultKind.STOP
            target = rng.choice((*names, *names, PROMPT_SOURCE, WEIGHT_PUBLISHER, SCORER, BUFFER))
            return Fault(at_s=at_s, kind=kind, target=target, duration_s=duration_s, as_zombie=rng.random() < 0.7)


def _route(trial: Trial, rng: random.Random) -> Trial:
    """One of four has a policy that chooses by itself."""
    policy = rng.choice(("round_robin", "consistent_hash", "", "", "", "", "", ""))
    return msgspec.structs.replace(trial, routing=policy) if policy else trial


def _reuse(trial: Trial, rng: random.Random) -> Trial:
    """One of four of those that can trains groups more than once."""
    if rng.random() >= 0.25 or not trial.max_staleness or trial.over_sampling > 1.0:
        return trial
    return msgspec.structs.replace(trial, reuse=rng.randint(2, min(4, trial.max_staleness + 1)))


def _bounded(trial: Trial) -> Trial:
    """Large batches make fewer steps: many runs of some hundred events find more than fewer long ones."""
    most = SAMPLES_TRAINED // (trial.groups_per_batch * trial.samples_per_group)
    return msgspec.structs.replace(trial, num_steps=max(3, min(trial.num_steps, most)))


def _control(trial: Trial, rng: random.Random) -> Trial:
    """One of two has something of what decides about sampling."""
    if rng.random() < 0.5:
        return trial
    drops = rng.choice((None, "before_statistics", "after_statistics"))
    judging = trial.judging
    if drops is not None:
        judging = msgspec.structs.replace(judging, drop_rate=rng.choice((0.1, 0.5)))
    if rng.random() < 0.5:
        judging = msgspec.structs.replace(judging, rejection_rate=rng.choice((0.3, 0.7)))
    replay = _draw_replay(rng)
    return msgspec.structs.replace(
        trial,
        judging=judging,
        keep_when_insufficient=rng.choice((None, 1, 2)),
        drop_samples=drops,
        shows_groups=rng.random() < 0.3,
        mask_old_tokens=rng.random() < 0.4,
        has_priority=rng.random() < 0.3,
        replay=replay if rng.random() < 0.4 else None,
    )


def _budget(trial: Trial, rng: random.Random) -> Trial:
    """One of four has rows with a retry budget of their own, and engines that fail often enough to spend it."""
    if rng.random() >= 0.25:
        return trial
    latency = msgspec.structs.replace(trial.latency, failure_rate=rng.choice((0.15, 0.4)))
    own_retries = rng.choice(((0,), (0, 1, 2, 3), (5,)))
    return msgspec.structs.replace(trial, latency=latency, own_retries=own_retries)


def _draw_replay(rng: random.Random) -> ReplayOptions:
    return ReplayOptions(
        fraction=rng.choice((0.3, 1.0)),
        below_reward=rng.choice((0.4, 0.6)),
        max_times=rng.randint(1, 3),
        min_gap=rng.randint(0, 3),
    )


def _go_on_otherwise(trial: Trial, rng: random.Random) -> Trial:
    """One of five loses the machine, once or twice, and goes on with rows that are chosen otherwise, or not at all."""
    if rng.random() >= 0.2:
        return trial
    choices = tuple(
        RowChoice(has_priority=rng.random() < 0.4, replay=_draw_replay(rng) if rng.random() < 0.4 else None)
        for _ in range(2)
    )
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    losses = (rng.uniform(0.0, span_s) for _ in range(rng.choice((1, 1, 2))))
    faults = tuple(Fault(at_s=at_s, kind=FaultKind.MACHINE, target="") for at_s in losses)
    return msgspec.structs.replace(trial, row_choices=choices, faults=(*trial.faults, *faults))


def _mix(trial: Trial, rng: random.Random) -> Trial:
    """One of four is of several sources with weights, where these mean something."""
    has_priority = trial.has_priority or any(choice.has_priority for choice in trial.row_choices)
    if rng.random() >= 0.25 or has_priority or trial.num_recorded:
        return trial
    sources = tuple(
        RowSource(name=f"source{index}", num_rows=rng.choice((1, 3, 17, 400)), share=rng.choice((1, 1, 2, 7)))
        for index in range(rng.randint(2, 3))
    )
    return msgspec.structs.replace(trial, sources=sources, num_rows=sum(source.num_rows for source in sources))


def _play(trial: Trial, rng: random.Random) -> Trial:
    """One of four plays episodes, which go on at another engine from their save points only."""
    if rng.random() >= 0.25 or trial.num_recorded:
        return trial
    latency = msgspec.structs.replace(trial.latency, response_tokens_median=rng.choice((14.0, 32.0, 32.0)))
    return msgspec.structs.replace(trial, save_share=rng.choice((0.0, 0.5, 0.5, 1.0)), latency=latency)


def _evaluate(trial: Trial, rng: random.Random) -> Trial:
    """Two of five evaluate."""
    if rng.random() >= 0.4:
        return trial
    num_datasets = rng.randint(1, 2)
    evaluation = EvaluationTrial(
        every=_maybe(rng, 0.7, lambda: rng.randint(1, 3)),
        before_first=rng.random() < 0.5,
        at_end=rng.random() < 0.7,
        pinned=rng.random() < 0.4,
        max_running=_maybe(rng, 0.5, lambda: rng.randint(1, 8)),
        num_rows=tuple(rng.randint(1, 3) for _ in range(num_datasets)),
        samples_per_prompt=tuple(rng.randint(1, 2) for _ in range(num_datasets)),
    )
    only: Literal["evaluate"] | None = "evaluate" if rng.random() < 0.05 else None
    evaluation = msgspec.structs.replace(evaluation, scores_groups=rng.choice((None, None, False, True)))
    return msgspec.structs.replace(trial, evaluation=evaluation, only=only)


def _record(trial: Trial, rng: random.Random) -> Trial:
    """One of five has engines for rows that hold their responses, and faults of their own."""
    if rng.random() >= 0.2:
        return trial
    mixed = msgspec.structs.replace(trial, num_recorded=rng.randint(1, 2))
    targets = mixed.engines[trial.num_engines :]
    kinds = (FaultKind.KILL, FaultKind.KILL, FaultKind.STOP)
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    faults = [
        Fault(
            at_s=rng.uniform(0.0, span_s),
            kind=rng.choice(kinds),
            target=rng.choice(targets),
            duration_s=rng.choice((rng.uniform(0.1, 9.0), 10 + rng.expovariate(0.2))),
            as_zombie=rng.random() < 0.7,
        )
        for _ in range(rng.choice((0, 1, 2)))
    ]
    return msgspec.structs.replace(mixed, faults=(*trial.faults, *faults))


def _teach(trial: Trial, rng: random.Random) -> Trial:
    """One of four has teachers, and faults of their own."""
    if rng.random() >= 0.25:
        return trial
    latency = TeacherLatencyOptions(
        sample_s=rng.choice((0.0, 0.05, 0.5)),
        token_s=rng.choice((0.0, 0.01)),
        failure_rate=0.15 if rng.random() < 0.25 else 0.0,
    )
    taught = msgspec.structs.replace(
        trial, num_teachers=rng.randint(1, 3), teacher_slots=rng.randint(1, 5), teacher_latency=latency
    )
    faults = [_draw_teacher_fault(rng, taught) for _ in range(rng.choice((0, 1, 2, 4)))]
    return msgspec.structs.replace(taught, faults=(*taught.faults, *faults))


def _draw_teacher_fault(rng: random.Random, trial: Trial) -> Fault:
    target, at_s = rng.choice(trial.teachers), rng.uniform(0.0, trial.num_steps * (trial.learner.step_s + 2.0))
    match rng.choice(("kill", "kill", "kill_within", "stop", "slow", "cut", "cut_answers")):
        case "kill":
            return Fault(at_s=at_s, kind=FaultKind.KILL, target=target)
        case "kill_within":
            return Fault(at_s=at_s, kind=FaultKind.KILL, target=target, after_effects=rng.randint(0, 8))
        case "stop":
            duration_s = rng.choice((rng.uniform(0.1, 9.0), 10 + rng.expovariate(0.2)))
            return Fault(at_s=at_s, kind=FaultKind.STOP, target=target, duration_s=duration_s, as_zombie=True)
        case "slow":
            return Fault(at_s=at_s, kind=FaultKind.SLOW, target=target, amount=20.0, duration_s=rng.uniform(1.0, 30.0))
        case way:
            sender, peer = (SCORER, target) if way == "cut" else (target, SCORER)
            return Fault(at_s=at_s, kind=FaultKind.CUT, target=sender, peer=peer, duration_s=rng.uniform(0.5, 20.0))


def _colocate(trial: Trial, rng: random.Random) -> Trial:
    """One of three has the learner on the devices of its engines, where these are one batch ahead at most."""
    if trial.policy not in ("sync", "one_step_off"):
        return trial
    latency = msgspec.structs.replace(trial.latency, sleep_s=rng.choice((0.0, 0.1, 2.0)), wake_s=rng.choice((0.0, 0.5)))
    learner = msgspec.structs.replace(trial.learner, sleep_s=rng.choice((0.0, 0.1, 2.0)), wake_s=rng.choice((0.0, 0.5)))
    shared = msgspec.structs.replace(trial, latency=latency, learner=learner)
    return colocated(shared) if rng.random() < 1 / 3 else shared


def colocated(trial: Trial) -> Trial:
    """The trial with the learner on the devices of its engines, which swap nothing while they generate."""
    mode = UpdateMode.DRAIN if trial.update_mode is UpdateMode.IN_FLIGHT else trial.update_mode
    return msgspec.structs.replace(trial, colocated=True, num_lent=0, update_mode=mode)


def _operate(trial: Trial, rng: random.Random) -> Trial:
    """One of four has an operator, who switches the policy, pauses new grants and ends that, and has checkpoints saved.
    Learner and engines that share their devices stay with the policies that they can have."""
    if rng.random() >= 0.25:
        return trial
    span_s = trial.num_steps * (trial.learner.step_s + 2.0)
    requests: list[Request] = []
    for _ in range(rng.choice((1, 2, 4))):
        at_s = rng.uniform(0.0, span_s)
        match rng.choice(("switch", "switch", "pause", "save")):
            case "switch":
                requests.append(Request(at_s=at_s, event=_draw_policy(rng, trial)))
            case "pause":
                end_s = at_s + rng.choice((0.1, 5.0, rng.uniform(0.0, 60.0)))
                requests += [
                    Request(at_s=at_s, event=GrantsPaused(is_paused=True)),
                    Request(at_s=end_s, event=GrantsPaused(is_paused=False)),
                ]
            case _:
                requests.append(Request(at_s=at_s, event=SaveAsked()))
    last = max(requests, key=lambda request: request.at_s)
    requests.append(Request(at_s=last.at_s, event=GrantsPaused(is_paused=False)))  # pauses may overlap
    return msgspec.structs.replace(trial, requests=tuple(requests))


def _draw_policy(rng: random.Random, trial: Trial) -> PolicyChanged:
    """Any built-in one, also such as cannot serve the trial's publishing."""
    policy = rng.choice(["sync", "one_step_off"] if trial.colocated else list(BUILTIN))
    defaults = BUILTIN[policy]
    modes = [mode for mode in defaults.update_modes if mode is not UpdateMode.IN_FLIGHT or not trial.colocated]
    return PolicyChanged(
        policy=policy,
        max_staleness=defaults.max_staleness if defaults.fixed_staleness else rng.randint(0, 8),
        update_mode=rng.choice(modes),
        on_stale=trial.on_stale if rng.random() < 0.6 else rng.choice(list(OnStale)),
    )


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
    num_faults = rng.choice((0, 1, 1, 2, 3, 5, 10))
    span_s = trial.num_steps * (trial.learner.step_s + 2.0 + 3 * trial.link.max_delay_s)
    kinds: tuple[str, ...] = ("kill", "kill", "kill_within", "kill_within", "stop_short", "stop_long", "slow")
    if weather == "rough":
        kinds = (*kinds, "link", "link", "link")
    if rng.random() < 0.25:
        kinds = (*kinds, "machine")
    return tuple(_draw_fault(rng, trial, rng.choice(kinds), rng.uniform(0.0, span_s)) for _ in range(num_faults))


def _draw_fault(rng: random.Random, trial: Trial, kind: str, at_s: float) -> Fault:
    replaced = rng.choice((*SINGLES, PROMPT_SOURCE, BUFFER, rng.choice(trial.engines), rng.choice(trial.engines)))
    match kind:
        case "machine":
            return Fault(at_s=at_s, kind=FaultKind.MACHINE, target="")
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
