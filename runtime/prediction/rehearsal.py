"""A scenario's whole run on the virtual clock with faults that come by chance, or at a moment, over many seeds.

Each seed is played twice, with and without its faults: what the run took without them, divided by what it took with
them, is its effective training time. When which fault comes is drawn from the seed alone, as a Poisson process of the
rate that was asked for, or it comes when a share of the steps is trained; what it hits is killed, as by SIGKILL, and
replaced as the supervisor replaces it, after ``start_s`` of its model. A fault that finds nobody, as its target is
being replaced, does not count.
"""

from __future__ import annotations

import copy
import random
import re
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.errors import UserFault
from penstock.messages.local import BatchTrained
from penstock.messages.names import is_engine
from penstock.runtime.chaos.faults import ChaosKind
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.process import Status
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.summary import wasted_tokens
from penstock.runtime.prediction.planning.candidate import Candidate
from penstock.runtime.prediction.planning.space import COLOCATE, devices_of
from penstock.runtime.prediction.workers import Workers
from penstock.runtime.run.wiring import actor_names
from penstock.runtime.scenario.load import scenario_from
from penstock.runtime.scenario.modelled import modelled_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.training import StepReported
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.planning.candidate import Prices
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Source

PREEMPT: Final = "preempt"
MACHINE: Final = str(ChaosKind.MACHINE)
MOST_PER_S: Final = 10.0
"""Faults of each target: with more, nothing but faults would be played."""
UNITS_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0}
_FORM: Final = re.compile(
    r"(?P<what>[a-z_]+)\s+(?P<times>\d{1,9}(\.\d{1,9})?)\s*/\s*(?P<unit>[a-z]+)(\s+per\s+(?P<per>[a-z]+))?"
)

_MOMENT: Final = re.compile(r"(machine|kill:(?P<target>[a-z_]+(/\d{1,6})?))@(?P<progress>\d{1,9}(\.\d{1,9})?)")
"""As ``penstock chaos --faults`` has it."""


class Rate(msgspec.Struct, frozen=True):
    """Faults of one kind."""

    targets: tuple[str, ...]
    """Actors, one of which is hit each time; ``machine``: all at once."""
    per_s: float
    """Of all targets together."""


class Moment(msgspec.Struct, frozen=True):
    """One fault, at a moment that was named."""

    target: str
    """An actor; ``machine``: all at once."""
    progress: float
    """Share of the run's steps that are trained then, in (0, 1)."""


Expected = Rate | Moment
"""Faults, as they were asked for."""


class Hit(msgspec.Struct, frozen=True):
    """A fault that came."""

    target: str
    at_s: float
    progress: float
    """Share of the run's steps that were trained then."""

    def __str__(self) -> str:
        what = MACHINE if self.target == MACHINE else f"{ChaosKind.KILL}:{self.target}"
        return f"{what}@{self.progress:.3f}"


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's run with its faults."""

    seed: int
    completed: bool
    story: str
    """Why it was not."""
    finish_s: float
    """From the start of the run to its end."""
    undisturbed_s: float
    """The same without faults."""
    tokens_lost: int
    """Made by engines that were killed before they had reported them, about."""
    steps_again: int
    """Trained once more, as the learner was lost after its last checkpoint."""
    tokens_unused: int
    """That left the system untrained, by whatever end."""
    hits: tuple[Hit, ...]

    @property
    def effective(self) -> float:
        """Effective training time, as a share of the run's; 1 where faults happened to make it no longer."""
        return min(1.0, self.undisturbed_s / self.finish_s)


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a scenario with faults."""

    scenario: str
    faults: str
    hourly: float | None
    """Price of an hour; None without prices."""
    runs: tuple[Played, ...]

    @property
    def completed(self) -> list[Played]:
        """Those that came to their end."""
        return [run for run in self.runs if run.completed]


class Job(NamedTuple):
    """One run to be played."""

    scenario: Scenario
    seed: int
    faults: tuple[Expected, ...]


def read_faults(text: str, scenario: Scenario) -> tuple[Expected, ...]:
    """Read ``preempt 0.05/h per engine, learner 0.01/h, kill:engine/3@0.5``.

    Raises:
        UserFault: a part of it cannot be read, or names nobody.
    """
    names = actor_names(scenario)
    found = tuple(_read(part.strip(), names) for part in text.split(",") if part.strip())
    if not found:
        raise UserFault("--faults: none is named; write such as 'preempt 0.05/h per engine, learner 0.01/h'")
    return found


def _read(part: str, names: Sequence[str]) -> Expected:
    if (moment := _MOMENT.fullmatch(part)) is not None:
        return _read_moment(part, moment["target"] or MACHINE, float(moment["progress"]), names)
    read = _FORM.fullmatch(part)
    if read is None:
        raise UserFault(
            f"--faults: cannot read '{part}'; write WHAT TIMES/UNIT, such as 'preempt 0.05/h per engine' or "
            "'learner 0.01/h', or kill:WHOM@SHARE, such as kill:engine/3@0.5"
        )
    what, unit, per = read["what"], read["unit"], read["per"]
    engines = tuple(name for name in names if is_engine(name))
    singles = {name: (name,) for name in names if not is_engine(name) and "/" not in name}
    known = {PREEMPT: engines, "engine": engines, MACHINE: (MACHINE,)} | singles
    if what not in known:
        raise UserFault(f"--faults: '{part}': there is no '{what}' to be hit; there are {', '.join(sorted(known))}")
    if unit not in UNITS_S:
        raise UserFault(f"--faults: '{part}': a rate is per {', '.join(UNITS_S)}; found {unit}")
    if per is not None and (per != "engine" or known[what] != engines):
        raise UserFault(
            f"--faults: '{part}': only preempt and engine are per engine; write {what} {read['times']}/{unit}"
        )
    targets = known[what]
    if not targets:
        raise UserFault(f"--faults: '{part}': the run has no engine")
    per_s = float(read["times"]) / UNITS_S[unit] * (len(targets) if per else 1)
    if per_s > MOST_PER_S * len(targets):
        raise UserFault(f"--faults: '{part}': is more than ten a second for each that is hit; is the unit right?")
    return Rate(targets, per_s)


def _read_moment(part: str, target: str, progress: float, names: Sequence[str]) -> Moment:
    if target != MACHINE and target not in names:
        raise UserFault(f"--faults: '{part}': there is no '{target}' to be hit; there are {', '.join(names)}")
    if not 0 < progress < 1:
        raise UserFault(f"--faults: '{part}': the moment is a share of the steps, between 0 and 1; found {progress:g}")
    return Moment(target, progress)


def rehearsed(
    source: Source,
    faults: str,
    seeds: range,
    *,
    prices: Prices | None = None,
    models: Models | None = None,
    num_processes: int = 1,
    on_done: Callable[[], None] | None = None,
) -> Rehearsal:
    """Play a scenario, as it was read, with these faults, as ``penstock rehearse`` takes them.

    Args:
        source: of the scenario, real or modelled.
        faults: see :func:`read_faults`.
        seeds: one or more.
        prices: of devices.
        models: how long things take; None: as the scenario's own models have it.
        num_processes: that play side by side.
        on_done: hears of every run that is over, two of each seed.

    Raises:
        UserFault: the faults cannot be read, or the scenario cannot be played.
    """
    real, (modelled, _) = scenario_from(copy.deepcopy(source)), modelled_from(copy.deepcopy(source))
    if real.run.only is not None:
        raise UserFault(f"run.only: {real.run.only}: a part of a run is not rehearsed; remove it")
    hourly = None if prices is None else _as_candidate(real).hourly(prices)
    if models is not None:
        modelled = models.applied(modelled)
    expected = read_faults(faults, real)
    with Workers(num_processes) as workers:
        runs = rehearse(modelled, expected, seeds, workers, on_done=on_done)
    return Rehearsal(scenario=real.run.name, faults=faults, hourly=hourly, runs=tuple(runs))


def _as_candidate(scenario: Scenario) -> Candidate:
    """Which has the price of its devices."""
    engines, staleness = scenario.engines, scenario.staleness
    if engines.more:
        raise UserFault("--price: engines of several kinds (engines.more) have no one price; leave --price away")
    return Candidate(
        policy=staleness.policy,
        max_staleness=staleness.max_staleness or 0,
        num_engines=engines.count,
        engine_devices=devices_of(engines),
        slots=engines.slots,
        learner_ranks=scenario.learner.num_ranks,
        is_colocated=engines.placement == COLOCATE,
    )


def rehearse(
    scenario: Scenario,
    faults: Sequence[Expected],
    seeds: Sequence[int],
    workers: Workers,
    *,
    on_done: Callable[[], None] | None = None,
) -> list[Played]:
    """Play each seed with and without these faults.

    Args:
        scenario: modelled.
        faults: that come.
        seeds: one or more.
        workers: that play.
        on_done: hears of every run that is over, two of each seed.

    Raises:
        UserFault: a run does not complete without faults either.
    """
    jobs = [Job(scenario, seed, those) for seed in seeds for those in ((), tuple(faults))]
    found = workers.map(played, jobs, on_done=on_done)
    results: list[Played] = []
    for calm, disturbed in zip(found[::2], found[1::2], strict=True):
        if not calm.completed:
            raise UserFault(
                f"the simulation with seed {calm.seed} does not complete without faults either: {calm.story}"
            )
        results.append(msgspec.structs.replace(disturbed, undisturbed_s=calm.finish_s))
    return results


def played(job: Job) -> Played:
    """One run."""
    run = msgspec.structs.replace(job.scenario.run, seed=job.seed)
    hits: list[Hit] = []
    left = sorted((each for each in job.faults if isinstance(each, Moment)), key=lambda each: each.progress)

    def told(report: StepReported) -> None:
        while left and report.version >= left[0].progress * run.num_steps:
            target, clock = left.pop(0).target, simulation.host.clock
            clock.at(clock.now_s, _call, partial(_strike, simulation, hits, target), None)

    simulation = Simulation(msgspec.structs.replace(job.scenario, run=run), on_step=told)
    watch = _Watch()
    simulation.host.watch(watch)
    for place, fault in enumerate(job.faults):
        if isinstance(fault, Rate):
            _arrange(simulation, hits, fault, random.Random(f"{job.seed}/{place}"))
    ending = simulation.run(None)
    result = simulation.result(ending, 0.0)
    return Played(
        seed=job.seed,
        completed=ending.completed,
        story="" if ending.completed else ending.story.partition("\n")[0],
        finish_s=ending.at_s,
        undisturbed_s=ending.at_s,
        tokens_lost=result.tokens_lost_estimate,
        steps_again=watch.num_trained - len(simulation.accounts.step_times),
        tokens_unused=sum(waste.num_tokens for waste in wasted_tokens(result.balance)),
        hits=tuple(hits),
    )


class _Watch(IdleWatcher):
    """Counts what the learner trains."""

    def __init__(self) -> None:
        self.num_trained = 0

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        self.num_trained += isinstance(event, BatchTrained)


def _arrange(simulation: Simulation, hits: list[Hit], rate: Rate, gaps: random.Random) -> None:
    """The next fault of this kind, and after it the one after it."""
    if rate.per_s > 0:
        clock = simulation.host.clock
        act = partial(_hit, simulation, hits, rate, gaps)
        clock.at(clock.now_s + gaps.expovariate(rate.per_s), _call, act, None)


def _hit(simulation: Simulation, hits: list[Hit], rate: Rate, gaps: random.Random) -> None:
    _strike(simulation, hits, gaps.choice(rate.targets))
    _arrange(simulation, hits, rate, gaps)


def _strike(simulation: Simulation, hits: list[Hit], target: str) -> None:
    host = simulation.host
    progress = len(simulation.accounts.step_times) / simulation.scenario.run.num_steps
    if target == MACHINE:
        host.lose_machine()
        hits.append(Hit(target, host.clock.now_s, progress))
    else:
        process = host.supervisor.processes.get(target)
        if process is not None and process.status is not Status.DEAD:
            process.kill()
            hits.append(Hit(target, host.clock.now_s, progress))


def _call(act: Callable[[], None], _: None) -> None:
    act()


def quantile_of(found: Sequence[Played], share: float) -> Played:
    """The run that at least this share of all runs is no longer than."""
    ordered = sorted(found, key=lambda each: each.finish_s)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def chaos_faults(run: Played) -> Iterator[str]:
    """As ``penstock chaos --faults`` takes them: those that come while there are steps left."""
    for hit in run.hits:
        if hit.progress < 1:
            yield str(hit)
