"""What a scenario comes to on the virtual clock, over several seeds: the figures that ``penstock simulate`` prints.

The intervals are from the lowest to the highest seed. They say how much chance decides, and not how far the models are
off: that is what calibration's checks say.
"""

from __future__ import annotations

import gc
import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity, UpdateMode
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.explain.bounds import Bound, Terms, bound_from
from penstock.runtime.observability.shares import LABELS
from penstock.runtime.prediction.depths import DepthGauge, Depths
from penstock.runtime.prediction.steady import Lanes, Steady, StepSeen, fewest_steps, steady_of, stretch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from penstock.messages.training import StepReported
    from penstock.runtime.scenario import Scenario

SIGNS_OF_LIFE: Final = 4
"""Reports of progress of a running request in the time after which PromptSource would look for it."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over the seeds."""

    mean: float
    low: float
    high: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the steady part of a scenario's run comes to."""

    scenario: str
    seeds: tuple[int, ...]
    step_s: Interval
    tokens_per_s: Interval
    goodput: Interval
    occupancy: Interval
    engines: dict[str, Interval]
    """Share of the time by state; states that never were are left out."""
    learner: dict[str, Interval]
    ages: tuple[float, ...]
    """Share of the trained samples by age in versions, over all seeds."""
    depths: dict[str, Interval]
    """Of the queues, as a mean over time, by the fields of :class:`.Depths`."""
    bound: Bound


def forecast(scenario: Scenario, seeds: Sequence[int], *, on_done: Callable[[], None] | None = None) -> Forecast:
    """Simulate a resolved, modelled scenario with each of these seeds.

    Args:
        scenario: with simulated engines and a simulated learner.
        seeds: one or more.
        on_done: hears of every simulation that is over.

    Raises:
        UserFault: a simulation did not come to its end, or has too few steps.
    """
    found: list[Steady] = []
    for seed in seeds:
        found.append(play(scenario, seed))
        if on_done is not None:
            on_done()
    return summed_up(scenario, seeds, found)


def play(scenario: Scenario, seed: int) -> Steady:
    """The steady part of one simulation, which ends with it; ``seed`` takes the place of ``run.seed``.

    Raises:
        UserFault: it did not come to the end of its steady part, or has too few steps.
    """
    scenario = msgspec.structs.replace(_told_less(scenario), run=msgspec.structs.replace(scenario.run, seed=seed))
    with _nothing_left():
        return _played(scenario)


@contextmanager
def _nothing_left() -> Generator[None]:
    """Let go of what is made within. Host and actors know each other, and messages are not counted, so the collector
    would not begin by itself. What was there before is not walked through: of a large process that takes a second."""
    is_first = not gc.get_freeze_count()
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_first:
            gc.unfreeze()


def _played(scenario: Scenario) -> Steady:
    watch = _Watch(scenario)
    ending = watch.simulation.run(None)
    if watch.after is None:
        told = f"{ending.story}{_hint(scenario)}"
        raise UserFault(f"the simulation with seed {scenario.run.seed} did not complete: {told}")
    return watch.steady()


def _hint(scenario: Scenario) -> str:
    """Where no modelled group can pass the filter: of runs whose rewards were all alike, that is what is learnt."""
    rate = scenario.reward.simulated.success_rate
    if not scenario.filter.drop_zero_spread or 0.0 < rate < 1.0:
        return ""
    return (
        f". Here no group can pass: {rate:g} of the modelled answers earn a reward (reward.simulated.success_rate, "
        "which --models has from its runs), so all of a group are alike; filter.drop_zero_spread=false keeps them"
    )


def _told_less(scenario: Scenario) -> Scenario:
    """The same with reports of progress as rare as nothing here depends on them.

    Reports of progress are half of all events, and say what another engine would go on from: without faults nobody
    does. PromptSource takes them for signs of life too, so one comes at least :data:`SIGNS_OF_LIFE` times in its
    ``lease_timeout_s``.
    """
    engines, lease_timeout_s = scenario.engines, scenario.prompt_source.lease_timeout_s
    model, most_tokens = engines.simulated, scenario.sampling.max_response_tokens
    if model.failure_rate or engines.more:
        return scenario
    held = engines.slots * (model.prompt_tokens + most_tokens)
    token_s = model.token_s + (engines.slots - 1) * model.token_load_s + held * model.context_token_s
    rare = int(lease_timeout_s / SIGNS_OF_LIFE * engines.simulated_speed / token_s)
    progress_tokens = max(engines.progress_tokens, min(rare, most_tokens))
    engines = msgspec.structs.replace(engines, progress_tokens=progress_tokens)
    return msgspec.structs.replace(scenario, engines=engines)


class _Watch:
    """A simulation, and its steps with the lanes at the two ends of the steady part."""

    def __init__(self, scenario: Scenario) -> None:
        num_steps, max_staleness = scenario.run.num_steps, scenario.staleness.max_staleness
        assert max_staleness is not None, "scenarios are resolved"
        stretch = stretch_of(num_steps, max_staleness)
        if stretch is None:
            raise UserFault(
                f"run.num_steps: {num_steps} steps are too few for a steady part with a staleness of {max_staleness}; "
                f"{fewest_steps(max_staleness)} are enough"
            )
        self._first, self._last = stretch
        self._steps: list[StepSeen] = []
        self._before: Lanes | None = None
        self._gauge: DepthGauge | None = None
        self.after: Lanes | None = None
        """At the end of the steady part, once that has come."""
        self.simulation = Simulation(scenario, on_step=self._seen, with_digest=False, may_lose=False)

    def _seen(self, report: StepReported) -> None:
        accounts = self.simulation.accounts
        place = len(accounts.step_times) - 1
        if place < self._first or self.after is not None:
            return
        self._steps.append(
            StepSeen(accounts.progress_s, report.staleness_counts, report.response_lengths, report.balance)
        )
        if place == self._first:
            self._before = self._lanes()
            self._gauge = DepthGauge(self.simulation.host, accounts.progress_s / len(accounts.step_times))
        elif place == self._last:
            self.after = self._lanes()
            self.simulation.host.fail("the steady part is over")

    def _lanes(self) -> Lanes:
        accounts = self.simulation.accounts
        engines, learner = accounts.shares_of(is_engine), accounts.shares_of(LEARNER.__eq__)
        return Lanes(engines.seconds, engines.occupied_s, learner.seconds)

    def steady(self) -> Steady:
        assert self._before is not None, "its steady part has begun"
        assert self._gauge is not None, "and its queues are looked at"
        assert self.after is not None, "and it has come to its end"
        return steady_of(self._steps, self._before, self.after, self._gauge.means())


def summed_up(scenario: Scenario, seeds: Sequence[int], found: Sequence[Steady]) -> Forecast:
    """The figures over the seeds."""
    step_s = interval([each.step_s for each in found])
    num_ages = max(len(each.ages) for each in found)
    return Forecast(
        scenario=scenario.run.name,
        seeds=tuple(seeds),
        step_s=step_s,
        tokens_per_s=interval([each.tokens_per_s for each in found]),
        goodput=interval([each.goodput for each in found]),
        occupancy=interval([each.occupancy for each in found]),
        engines=_states([each.engines for each in found]),
        learner=_states([each.learner for each in found]),
        depths=_depths(found),
        ages=tuple(statistics.fmean([*each.ages, *[0.0] * num_ages][age] for each in found) for age in range(num_ages)),
        bound=_bound(scenario, found, step_s.mean),
    )


def interval(values: Sequence[float]) -> Interval:
    """Mean, lowest and highest of one value or more."""
    return Interval(mean=statistics.fmean(values), low=min(values), high=max(values))


def _states(found: Sequence[dict[str, float]]) -> dict[str, Interval]:
    intervals = {label: interval([each[label] for each in found]) for label in LABELS.values()}
    return {label: value for label, value in intervals.items() if value.high > 0}


def _depths(found: Sequence[Steady]) -> dict[str, Interval]:
    seen = [each.depths for each in found if each.depths is not None]
    return {name: interval(values) for name, *values in zip(Depths._fields, *seen, strict=True)}


def _bound(scenario: Scenario, found: Sequence[Steady], step_s: float) -> Bound:
    """Of the schedule; the longest response takes as long as it does beside as many others as there were."""
    model, staleness = scenario.engines.simulated, scenario.staleness
    assert staleness.max_staleness is not None, "scenarios are resolved"
    running = max(1.0, scenario.engines.slots * statistics.fmean(each.occupancy for each in found))
    token_s = (model.token_s + (running - 1) * model.token_load_s) / scenario.engines.simulated_speed
    engines = [each.engines_busy * each.occupancy * each.step_s for each in found]
    return bound_from(
        Terms(
            generation_s=statistics.fmean(engines),
            longest_s=model.prefill_s + token_s * statistics.fmean(each.longest_tokens for each in found),
            training_s=statistics.fmean(each.learner_busy * each.step_s for each in found),
            exposed_s=statistics.fmean(each.learner[LABELS[Activity.PUBLISHING]] * each.step_s for each in found),
            measured_s=step_s,
            max_staleness=staleness.max_staleness,
            drains=staleness.update_mode is UpdateMode.DRAIN,
            is_colocated=scenario.engines.placement == "colocate",
        )
    )
