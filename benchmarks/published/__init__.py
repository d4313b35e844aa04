"""Runs that others have published, predicted from few of their figures: SkyPilot's with slime within 8 % as a mean, and
the sign of every gain in NeMo-RL's table; verl's, AReaL's and marin's sweeps of staleness, and PipelineRL's gains.

How it is measured:

* On the virtual clock, from the figures that stand in the modules of this folder with their sources. What a run is
  fitted to and what is predicted is fixed there; docs/studies/published.md has the assumptions and what came of them.
* A repetition is another seed: the fit and the predictions anew. An error is (predicted − published) ÷ published.
* Published times are single runs of two steps (SkyPilot), means of five steps (NeMo-RL) and of 400 (verl),
  throughputs (AReaL), means of 25 and of 100 updates (marin), and ratios (PipelineRL).
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from penstock.benchmarks._harness import Benchmark, Measured, claim, fact, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks.published import areal, marin, nemo_rl, pipelinerl, skypilot, verl
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from penstock.benchmarks._results import Claim, Figure

QUICK: Final = ("--studies", "nemo_rl", "--repetitions", "1")
QUICK_S: Final = 15
MOST: Final = 0.08
"""Mean error of SkyPilot's four runs that nothing was fitted to."""

Found = tuple["list[Figure]", "list[Claim]"]


def of_skypilot(given: argparse.Namespace, seeds: Iterable[int]) -> Found:
    """Six runs, two fitted."""
    few, many = given.fitted_on
    if few >= many:
        raise UserFault(f"--fitted-on {few} {many}: two numbers of engines from 1 to 3, the fewer first")
    made = [skypilot.predicted(seed, (few, many), given.slots) for seed in seeds]
    figures: list[Figure] = []
    for key, measured_s in skypilot.MEASURED_S.items():
        if key in made[0].as_slime:
            times = [each.as_slime[key] for each in made]
            figures += _figures(f"SkyPilot, {key[0]}, {key[1]} engines", times, measured_s)
    for engines in (1, 2, 3):
        values = [each.as_here[engines] for each in made]
        figures.append(plain_figure(f"SkyPilot, {engines} engines: one_step_off as it is here", "s a step", values))
    means = [
        statistics.fmean(abs(step_s / skypilot.MEASURED_S[key] - 1) for key, step_s in each.as_slime.items())
        for each in made
    ]
    return figures, [claim("SkyPilot: mean |error| of the runs that nothing was fitted to", means, at_most=MOST)]


def of_nemo_rl(given: argparse.Namespace, seeds: Iterable[int]) -> Found:
    """Six pairs of equal GPUs."""
    figures: list[Figure] = []
    claims: list[Claim] = []
    seeds = list(seeds)
    for pair in nemo_rl.PAIRS:
        made = [nemo_rl.predicted(pair, seed, given.bandwidth_share) for seed in seeds]
        name = f"NeMo-RL, {pair.name}"
        figures += _figures(f"{name}, one off", [each.one_off_s for each in made], pair.one_off_s)
        figures.append(plain_figure(f"{name}: generation on all GPUs", "s", [each.generation_s for each in made]))
        figures.append(plain_figure(f"{name}: training on half of them", "s", [each.training_s for each in made]))
        gains = pair.one_off_s < pair.on_policy_s
        word = "quicker" if gains else "slower"
        is_so = all((each.one_off_s < pair.on_policy_s) == gains for each in made)
        claims.append(fact(f"{name}: one off is {word} than on-policy, {pair.on_policy_s:g} s", holds=is_so))
    return figures, claims


def of_verl(given: argparse.Namespace, seeds: Iterable[int]) -> Found:
    """Four thresholds, one fitted."""
    del given
    made = [verl.predicted(seed) for seed in seeds]
    figures: list[Figure] = []
    for threshold, measured_s in verl.MEASURED_S.items():
        fitted = "" if threshold else " (fitted)"
        times = [each[threshold] for each in made]
        figures += _figures(f"verl, threshold {threshold:g}{fitted}", times, measured_s)
    return figures, []


def of_areal(given: argparse.Namespace, seeds: Iterable[int]) -> Found:
    """Two sweeps of the bound, of which two or three steps are fitted."""
    del given
    made = [areal.predicted(seed) for seed in seeds]
    figures: list[Figure] = [plain_figure("AReaL: median of the lengths", "tokens", [each.median for each in made])]
    for sweep in areal.SWEEPS:
        for eta in sweep.tokens_a_second:
            fitted = " (fitted)" if eta in sweep.fitted else ""
            times = [each.as_areal[sweep.name][eta] for each in made]
            figures += _figures(f"AReaL, {sweep.name}, bound {eta}{fitted}", times, sweep.published_s(eta))
    for eta in made[0].as_here:
        here = [each.as_here[eta] for each in made]
        figures.append(plain_figure(f"AReaL, {areal.LONG.name}: fully_async with {eta} here", "s a step", here))
    gains = [each.in_turns / each.as_areal[areal.LONG.name][8] for each in made]
    ratios = [f"{hours / areal.HOURS['AReaL']:.2f} {name}" for name, hours in areal.HOURS.items() if name != "AReaL"]
    name = f"AReaL, in turns on all GPUs ÷ bound 8: predicted, {' and '.join(ratios)} published"
    return [*figures, plain_figure(name, "times as long", gains)], []


def of_marin(given: argparse.Namespace, seeds: Iterable[int]) -> Found:
    """Three cadences from the synchronous run, and two sweeps of the allowance, of which three runs are fitted."""
    del given
    made = [marin.predicted(seed) for seed in seeds]
    figures: list[Figure] = []
    for cadence in marin.CADENCES:
        times = [each.by_cadence[cadence] for each in made]
        figures += _figures(f"marin, {cadence.name}", times, round(cadence.total_s / 25, 2))
    figures.append(plain_figure("marin: median of the lengths by allowance", "tokens", [each.median for each in made]))
    for sweep in (marin.MAIN, marin.BRANCH):
        for allowance in made[0].by_allowance[sweep.name]:
            fitted = " (fitted)" if allowance in sweep.fitted else ""
            times = [each.by_allowance[sweep.name][allowance] for each in made]
            figures += _figures(
                f"marin, {sweep.name}, allowance {allowance}{fitted}", times, round(sweep.total_s[allowance] / 100, 2)
            )
    return figures, []


def of_pipelinerl(given: argparse.Namespace, seeds: Iterable[int]) -> Found:
    """The estimate, and the run."""
    del given
    seeds = list(seeds)
    estimate = [pipelinerl.predicted(pipelinerl.ESTIMATE, seed, *pipelinerl.PIPELINE) for seed in seeds]
    run = [pipelinerl.predicted(pipelinerl.RUN, seed) for seed in seeds]
    name, oldest = "PipelineRL, estimate", f"{pipelinerl.LAG * 128:,}"
    flash, times, age = "tokens a flash", "times", "sequences"
    pairs = [
        (f"{name}: pipeline, {pipelinerl.PIPELINE[0]} published", flash, [each.pipeline for each in estimate]),
        (f"{name}: in turns, {pipelinerl.IN_TURNS} published", flash, [each.in_turns for each in estimate]),
        (f"{name}: speed-up, {pipelinerl.SPEED_UP} published", times, [each.speed_up for each in estimate]),
        (f"{name}: oldest, {oldest} published", age, [float(each.oldest) for each in estimate]),
        ("PipelineRL, run: speed-up, about 2 published", times, [each.speed_up for each in run]),
        ("PipelineRL, run: oldest, 50,000 published (fitted)", age, [float(each.oldest) for each in run]),
    ]
    return [plain_figure(*each) for each in pairs], []


def _figures(name: str, times: list[float], measured_s: float) -> list[Figure]:
    return [
        plain_figure(f"{name}: predicted, {measured_s:,g} s published", "s a step", times),
        plain_figure(f"{name}: error", "of the published", [each / measured_s - 1 for each in times]),
    ]


STUDIES: Final[dict[str, Callable[[argparse.Namespace, Iterable[int]], Found]]] = {
    "skypilot": of_skypilot,
    "nemo_rl": of_nemo_rl,
    "verl": of_verl,
    "areal": of_areal,
    "marin": of_marin,
    "pipelinerl": of_pipelinerl,
}


def measure(given: argparse.Namespace) -> Measured:
    """Each study with every seed."""
    figures: list[Figure] = []
    claims: list[Claim] = []
    for name in in_turn(given.studies, str):
        found = STUDIES[name](given, range(given.repetitions))
        figures += found[0]
        claims += found[1]
    return Measured(figures, claims)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5, name="published")
    benchmark.option("--studies", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    benchmark.option(
        "--fitted-on", type=int, nargs=2, choices=[1, 2, 3], default=[1, 3], metavar="ENGINES",
        help="SkyPilot: engines of the two synchronous runs that are fitted (default: 1 3)",
    )  # fmt: skip
    benchmark.option("--slots", type=int, default=skypilot.SLOTS, help="SkyPilot: requests that an engine holds")
    benchmark.option(
        "--bandwidth-share", type=float, default=nemo_rl.BANDWIDTH_SHARE,
        help="NeMo-RL: of a GPU's memory bandwidth, that decoding reaches",
    )  # fmt: skip
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
