"""The search: screened by the bound of the schedule, climbed from the best, and halved with more and more seeds.

1. Every choice is estimated (:mod:`.estimate`). Of each schedule the best is played with one seed, then others that
   are no neighbours of it, up to :data:`SCREENED` of the budget.
2. From the best ones their neighbours are played, the split of the devices in steps that are halved where nothing
   better was found, until steps of one find nothing.
3. The best and those that nothing beats get a second seed; the best of these all of them. Only what has all seeds is
   chosen.

Of large batches the first two play a part (:mod:`.part`), of which the third begins anew with the whole.

But for the first of its schedule, nothing is played that cannot come near the best, even with slots that are never
empty (:meth:`.estimate.Estimator.most_tokens_per_s`), and nothing gets more seeds that one or two have left behind it.

The same space, seeds and budget give the same result, however many processes play.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.prediction.forecast import play
from penstock.runtime.prediction.planning.candidate import Objective
from penstock.runtime.prediction.planning.estimate import Estimator
from penstock.runtime.prediction.planning.measured import AS_GOOD, Measured, chosen, measured, pareto
from penstock.runtime.prediction.planning.part import as_whole, part_of, times_as_noisy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.runtime.prediction.planning.candidate import Asked, Candidate
    from penstock.runtime.prediction.planning.space import Space
    from penstock.runtime.prediction.planning.varied import VariedSpace
    from penstock.runtime.prediction.steady import Steady
    from penstock.runtime.prediction.workers import Workers
    from penstock.runtime.scenario import Scenario

    AnySpace = Space | VariedSpace

STEADY_STEPS: Final = 12
"""That are counted of each simulation; fewer, down to half of them, where that makes :data:`STEADY_SAMPLES`, since
chance in large batches evens out within them."""
STEADY_SAMPLES: Final = 6144
SCREENED: Final = 0.4
"""Of the budget."""
HALVED: Final = 0.5
"""Of the budget: the most that is kept for the last part."""
NUM_CLIMBERS: Final = 3
NUM_FINALISTS: Final = 3
LEAST_ROUNDS: Final = 4
"""Simulations for each seed that the budget must have: half of them find the best, and half compare them."""
FIRST_REACH: Final = 0.1
REACH: Final = 0.04
"""By how much of the best a choice may be worse, after a first look and after the second, and be played again."""
MAX_VAIN: Final = 2
"""Rounds with a step of one that find nothing better, after which the climb is over."""


class Job(NamedTuple):
    """One simulation."""

    scenario: Scenario
    seed: int


class Failed(NamedTuple):
    """A simulation that came to nothing, and why."""

    cause: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    chosen: Measured
    pareto: tuple[Measured, ...]
    """Nothing that was played whole is better than these in everything; the quickest first. Some may have fewer seeds
    than were asked for."""
    tried: tuple[Measured, ...]
    """All others, the best first."""
    num_candidates: int
    num_simulations: int
    num_parts: int
    """Of these, simulations of a part of the batch on a part of the engines."""
    num_exhaustive: int
    """Simulations of every candidate with every seed."""
    refused: tuple[str, ...]
    """Why choices are none, each once."""


def search(space: AnySpace, asked: Asked, workers: Workers, *, on_round: Callable[[int], Callable[[], None]]) -> Plan:
    """The best choice.

    Args:
        space: of the scenario.
        asked: what is to be best, and with how many simulations.
        workers: that play.
        on_round: is told how many simulations come now, and gives what hears of each that is over.

    Raises:
        UserFault: nothing could be played, or the budget does not suffice for the seeds.
    """
    if asked.budget < LEAST_ROUNDS * asked.num_seeds:
        raise UserFault(
            f"--budget: {asked.budget} simulations are too few to compare choices with {asked.num_seeds} seeds; take "
            f"{LEAST_ROUNDS * asked.num_seeds} or more, or fewer --seeds"
        )
    trials = Trials(space, asked, workers, on_round)
    _screen(trials, asked)
    if not trials.all():
        raise UserFault(f"no choice could be played: {'; '.join(trials.refused)}")
    _climb(trials, space, asked)
    finals = _halve(trials, asked)
    best = chosen(finals, asked.objective)
    front = pareto(trials.whole(1))  # a part says where to look, and is not compared with the whole of another
    shown = {each.candidate for each in front}
    others = sorted(
        (each for each in trials.all() if each.candidate not in shown),
        key=lambda each: each.value(asked.objective),
        reverse=True,
    )
    return Plan(
        chosen=best,
        pareto=tuple(front),
        tried=tuple(others),
        num_candidates=len(space.candidates),
        num_simulations=trials.num_played,
        num_parts=trials.num_parts,
        num_exhaustive=len(space.candidates) * asked.num_seeds,
        refused=tuple(trials.refused),
    )


class Trials:
    """What was played so far."""

    def __init__(
        self, space: AnySpace, asked: Asked, workers: Workers, on_round: Callable[[int], Callable[[], None]]
    ) -> None:
        self.steady: dict[Candidate, list[Steady]] = {}
        self.looked: dict[Candidate, Steady] = {}
        """What a part says of those that were not played whole."""
        self.refused: dict[str, None] = {}
        self.num_played = self.num_parts = 0
        self._space, self._asked, self._workers, self._on_round = space, asked, workers, on_round
        self._estimators: dict[tuple[str, ...], Estimator] = {}
        """By what candidates vary: sizes of batches are among it."""
        self._chance = 0.0
        """In the lengths, of the batches in which there is most of it."""
        self.estimates = {each: self._worth(self._estimate(each), each) for each in space.candidates}
        """The larger, the better."""
        self._out: set[Candidate] = set()
        self._best = 0.0
        """Tokens a second, or for their price, of the best that was played."""
        self._trust = 1.0
        """Of what nothing should pass, the most that a simulation came to."""

    def _worth(self, tokens_per_s: float, candidate: Candidate) -> float:
        asked = self._asked
        if asked.objective is Objective.COST and asked.prices is not None:
            return tokens_per_s / max(1e-12, candidate.hourly(asked.prices))
        return tokens_per_s

    def _estimate(self, candidate: Candidate) -> float:
        sketch = self._space.sketch_of(candidate)
        if candidate.varied not in self._estimators:
            self._estimators[candidate.varied] = estimator = Estimator(sketch)
            self._chance = max(self._chance, estimator.chance(counted_steps(sketch)) * times_as_noisy(sketch))
        return self._estimators[candidate.varied].tokens_per_s(sketch)

    def _most(self, candidate: Candidate) -> float:
        estimator = self._estimators[candidate.varied]
        return self._worth(estimator.most_tokens_per_s(self._space.sketch_of(candidate)), candidate)

    def promise(self, candidate: Candidate) -> tuple[float, float]:
        """The larger, the sooner it is played: its estimate, and of equal ones what it could come to."""
        return self.estimates[candidate], self._most(candidate)

    def is_hopeless(self, candidate: Candidate) -> bool:
        """Whether no simulation of it can come near the best: neither by its slots nor by chance in its lengths."""
        if self._asked.objective is Objective.GOODPUT:
            return False  # nothing but a simulation knows it
        most = self._most(candidate) * self._trust * (1 + self._chance)
        return most < (1 - AS_GOOD) * self._best

    @property
    def left(self) -> int:
        """Simulations that the budget allows."""
        return self._asked.budget - self.num_played

    def is_new(self, candidate: Candidate) -> bool:
        """Whether it was neither played nor refused."""
        return candidate not in self.steady and candidate not in self.looked and candidate not in self._out

    def is_allowed(self, candidate: Candidate) -> bool:
        """Whether the scenario's rules have nothing against it."""
        if candidate in self._out:
            return False
        try:
            self._space.real_of(candidate)
        except UserFault as error:
            self._refuse(candidate, str(error).partition(": ")[2] or str(error))
            return False
        return True

    def _refuse(self, candidate: Candidate, cause: str) -> None:
        self._out.add(candidate)
        self.refused[cause] = None
        self.steady.pop(candidate, None)
        self.looked.pop(candidate, None)

    def look(self, candidates: Sequence[Candidate]) -> None:
        """Play each of them with one seed; of large batches a part."""
        seed = self._space.real.run.seed
        wholes = {each: self._space.modelled_of(each) for each in candidates if each not in self._out}
        parts = {each: part for each, whole in wholes.items() if (part := part_of(whole)) is not None}
        found = self._run([Job(_shortened(parts.get(each, wholes[each])), seed) for each in wholes])
        self.num_parts += len(parts)
        for (candidate, whole), one in zip(wholes.items(), found, strict=True):
            if isinstance(one, Failed):
                self._refuse(candidate, one.cause)
            elif candidate in parts:
                self._note(candidate, as_whole(one, whole, parts[candidate]), self.looked.__setitem__)
            else:
                self._note(candidate, one, self._add)

    def play(self, candidates: Sequence[Candidate], num_seeds: int) -> None:
        """Bring each of them up to so many seeds."""
        first = self._space.real.run.seed
        wanted = [
            (each, first + place)
            for each in candidates
            if each not in self._out
            for place in range(len(self.steady.get(each, ())), num_seeds)
        ]
        found = self._run([Job(_shortened(self._space.modelled_of(each)), seed) for each, seed in wanted])
        for (candidate, _), one in zip(wanted, found, strict=True):
            if isinstance(one, Failed):
                self._refuse(candidate, one.cause)
            elif candidate not in self._out:
                self._note(candidate, one, self._add)

    def _run(self, jobs: Sequence[Job]) -> list[Steady | Failed]:
        self.num_played += len(jobs)
        return self._workers.map(steady_of_job, jobs, on_done=self._on_round(len(jobs)))

    def _note(self, candidate: Candidate, one: Steady, keep: Callable[[Candidate, Steady], None]) -> None:
        keep(candidate, one)
        worth = self._worth(one.tokens_per_s, candidate)
        self._trust = max(self._trust, worth / self._most(candidate))
        self._best = max(self._best, worth)

    def _add(self, candidate: Candidate, one: Steady) -> None:
        self.looked.pop(candidate, None)
        self.steady.setdefault(candidate, []).append(one)

    def all(self) -> list[Measured]:
        """Everything that was played."""
        looked = [measured(each, [one], self._asked.prices, is_part=True) for each, one in self.looked.items()]
        return [measured(each, found, self._asked.prices) for each, found in self.steady.items()] + looked

    def best(self, number: int) -> list[Candidate]:
        """The best of them first."""
        return [each.candidate for each in self._ranked(self.all())[:number]]

    def whole(self, num_seeds: int) -> list[Measured]:
        """Those that were played whole with so many seeds or more."""
        return [each for each in self.all() if each.num_seeds >= num_seeds and not each.is_part]

    def _ranked(self, found: Sequence[Measured]) -> list[Measured]:
        return sorted(found, key=lambda each: each.value(self._asked.objective), reverse=True)

    def finalists(self, found: Sequence[Measured], reach: float) -> list[Candidate]:
        """The best of these, as far as they are near enough to the first."""
        ranked = self._ranked(found)[:NUM_FINALISTS]
        *exact, best = ranked[0].value(self._asked.objective)
        least = best - reach * abs(best)
        values = [each.value(self._asked.objective) for each in ranked]
        return [
            each.candidate
            for each, (*first, last) in zip(ranked, values, strict=True)
            if first != exact or last >= least
        ]


def steady_of_job(job: Job) -> Steady | Failed:
    """Play one; a scenario that cannot be played says why."""
    try:
        return play(job.scenario, job.seed)
    except UserFault as error:
        return Failed(str(error).partition("\n")[0])


def counted_steps(scenario: Scenario) -> int:
    """Steps that are counted of simulations of batches of this size."""
    samples = scenario.learner.groups_per_batch * scenario.sampling.samples_per_group
    return min(STEADY_STEPS, max(STEADY_STEPS // 2, -(-STEADY_SAMPLES // samples)))


def _shortened(scenario: Scenario) -> Scenario:
    """With as many steps as it takes to count :func:`counted_steps` of them, or η + 2 (:func:`.steady.stretch_of`)."""
    eta = scenario.staleness.max_staleness
    assert eta is not None, "scenarios are resolved"
    num_steps = -(-(max(counted_steps(scenario), eta + 2) + 2 + eta) * 5 // 4)
    return msgspec.structs.replace(scenario, run=msgspec.structs.replace(scenario.run, num_steps=num_steps))


def _screen(trials: Trials, asked: Asked) -> None:
    """Of each schedule in turn the next best by its estimate that is no neighbour of one that was taken."""
    lists: dict[tuple[str, int, bool, tuple[str, ...]], list[Candidate]] = {}
    for each in sorted(trials.estimates, key=lambda one: -trials.estimates[one]):
        lists.setdefault((each.policy, each.max_staleness, each.is_colocated, each.varied), []).append(each)
    taken: list[Candidate] = []
    most = min(asked.budget // 2, max(len(lists), int(SCREENED * asked.budget)))
    while len(taken) < most and any(lists.values()):
        now: list[Candidate] = []
        for waiting in lists.values():
            while waiting and len(taken) + len(now) < most:
                each = waiting.pop(0)
                if _is_apart(each, [*taken, *now], asked) and not trials.is_hopeless(each) and trials.is_allowed(each):
                    now.append(each)
                    break
        trials.look(now)
        taken += now


def _is_apart(candidate: Candidate, others: Sequence[Candidate], asked: Asked) -> bool:
    """Whether it is no neighbour of any of these."""
    apart = max(1, asked.num_devices // 16)
    return not any(
        abs(candidate.num_engines - one.num_engines) <= apart
        and (
            candidate.policy,
            candidate.max_staleness,
            candidate.is_colocated,
            candidate.engine_devices,
            candidate.slots,
            candidate.varied,
        )
        == (one.policy, one.max_staleness, one.is_colocated, one.engine_devices, one.slots, one.varied)
        for one in others
    )


def _climb(trials: Trials, space: AnySpace, asked: Asked) -> None:
    """From the best ones uphill."""
    spacing = max(1, asked.num_devices // 8)
    num_more = asked.num_seeds - (not trials.looked)
    compared = NUM_FINALISTS * num_more + len(pareto(trials.all()))
    reserved = min(compared, int(HALVED * asked.budget * num_more / asked.num_seeds))
    num_vain = 0
    while trials.left > reserved and num_vain < MAX_VAIN:
        before = trials.best(1)
        near = dict.fromkeys(one for each in trials.best(NUM_CLIMBERS) for one in space.neighbours(each, spacing))
        new = sorted((one for one in near if trials.is_new(one)), key=trials.promise, reverse=True)
        allowed: list[Candidate] = []
        for one in new:
            has_room = len(allowed) < min(2 * NUM_CLIMBERS, trials.left - reserved)
            if has_room and not trials.is_hopeless(one) and trials.is_allowed(one):
                allowed.append(one)
        trials.look(allowed)
        if allowed and trials.best(1) != before:
            num_vain = 0
        else:
            num_vain += spacing == 1
            spacing = max(1, spacing // 2)


def _halve(trials: Trials, asked: Asked) -> list[Measured]:
    """Those with all seeds."""
    # One simulation of a whole large batch says as much as two of a small one.
    some = 1 if trials.looked else min(asked.num_seeds, 2)
    most = max(1, trials.left // max(1, some - 1) // 2)
    front = [each.candidate for each in pareto(trials.all())]
    trials.play(list(dict.fromkeys([*trials.finalists(trials.all(), FIRST_REACH), *front]))[:most], some)
    if not trials.whole(some):
        raise UserFault(f"no choice could be played with a whole batch: {'; '.join(trials.refused)}")
    best = trials.finalists(trials.whole(some), REACH if asked.num_seeds > 1 else FIRST_REACH)
    trials.play(best[: max(1, trials.left // max(1, asked.num_seeds - some))], asked.num_seeds)
    return trials.whole(asked.num_seeds)
