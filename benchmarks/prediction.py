"""Models that were calibrated on runs under one policy predict step time and busy shares of the other two within 10 %,
at the speed that the machine then has.

How it is measured:

* ``penstock run`` with the embedded engine and learner, in scenarios that differ in what binds. Each policy has a run
  of its own in each repetition, and each repetition a seed; the learning rate is too small to change what is sampled.
* In each repetition the models are fitted to the run of one policy alone, and play the scenarios of the other two on
  the virtual clock, with several seeds. An error is (predicted − measured) ÷ measured of the time of a step, and the
  difference of the shares of the time in which engines and learner worked. Steps are those of
  ``runtime/prediction/steady.py``.
* Beside each error stands the machine's own noise: how far the repetitions of one run are from their mean, and how far
  the two halves of a run's steady part are from each other, which one repetition tells too.
* Two more errors leave out what changed on the machine between two runs. *Of decode alone*: the predicted run's own
  models play it, with a decode pass divided into what goes with requests, with their tokens and with neither as in the
  calibrated run. *At its speed*: the calibrated models play it, all times of engines and learner as much longer as the
  same work took CPU time there: undisturbed decode passes with as many requests, and steps. These ratios are printed.
  The claim is of this error where both runs tell their CPU time: how quick a shared machine will be in half a minute
  no model of an earlier run can know.
* Engines, learner and all other actors share the machine's cores; models hold how many each wants. In ``served`` the
  engine is an SGLang server on the CPU (``penstock env sglang`` has to be there), whose cores nobody counts.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from penstock.backends.engines.decode_passes import added_up
from penstock.benchmarks._harness import Benchmark, Measured, claim, in_folders, plain_figure
from penstock.benchmarks._runs import run
from penstock.messages.errors import UserFault
from penstock.runtime.observability.facts import SCENARIO_FILE
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.prediction.calibrate import calibrate
from penstock.runtime.prediction.forecast import play
from penstock.runtime.prediction.recorded import Recording, read_recording
from penstock.runtime.prediction.steady import stretch_of
from penstock.runtime.prediction.workers import usable_cores
from penstock.runtime.scenario.modelled import load_modelled

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.benchmarks._results import Claim, Figure
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.prediction.steady import Steady
    from penstock.runtime.scenario import Scenario

QUICK: Final = ("--repetitions", "1", "--steps", "16", "--scenarios", "balanced")
QUICK_S: Final = 75
POLICIES: Final = ("sync", "one_step_off", "fully_async")
MOST: Final = 0.1
"""Error that is claimed."""
SEEDS: Final = range(5)
"""One alone draws lengths that make 1 to 2 % of a step."""
BASE: Final = """\
run: {name: prediction}
model: {make: xs}
data: {path: "lines:4000"}
sampling: {samples_per_group: 8, max_response_tokens: 128}
reward: {function: lines}
filter: {drop_zero_spread: false}
engines: {slots: 32}
learner:
  groups_per_batch: 16
  learning_rate: 1.0e-12
  warm_start: {path: "lines:4000", num_steps: 100}
observability: {report: false, trace_fraction: 1.0}
"""
SLOW_REWARD: Final = """\
import time


def reward(response, label):
    time.sleep(0.05)
    return float(len(response) % 2)
"""
TOOLS: Final = """\
import asyncio
import random


async def episode(play):
    draw = random.Random(f"{play.task.group_id} {play.task.index}")
    await play.generate()
    for _ in range(draw.randrange(3)):
        await play.call(asyncio.sleep(0.15 * draw.lognormvariate(0.0, 0.4)), timeout_s=10.0, name="lookup")
        await play.generate("= 17 + 25\\n")
"""
SCENARIOS: Final[dict[str, tuple[str, ...]]] = {
    "long_tails": ("sampling.max_response_tokens=400", "learner.warm_start.num_steps=20"),
    "slow_reward": ("reward.function={folder}/slow.py:reward", "reward.num_workers=4"),
    "two_engines": ("engines.count=2",),
    "heavy_learner": ("learner.num_passes=3",),
    "tools": ("episode.kind=function", "episode.generate={folder}/tools.py:episode"),
    "shared_devices": ("engines.count={cores}", "learner.num_passes=2"),
    "balanced": (),
    "small_batches": ("learner.groups_per_batch=8",),
    "served": (
        "engines.backend=sglang",
        "engines.device=cpu",
        "engines.sglang={{max_total_tokens: 16384, mem_fraction_static: 0.2}}",
        "runtime.heartbeat_timeout_s=60",
    ),
}
DEFAULT: Final = tuple(SCENARIOS)[:6]
"""Without --scenarios. All share the machine's cores; in ``shared_devices`` there is an engine for each."""


class Arm(NamedTuple):
    """One run, with its scenario as it is modelled."""

    recording: Recording
    modelled: Scenario
    drift: float
    """Of the step between the halves of the steady part: (second − first) ÷ mean."""
    train_cpu_s: float
    """CPU time of a step's training; 0: the learner has not told."""

    @property
    def steady(self) -> Steady:
        assert self.recording.steady is not None, "the arms have steps enough"
        return self.recording.steady


def record(name: str, policy: str, num_steps: int, seeds: Iterator[int], folder: Path) -> Arm:
    """Run one scenario under one policy and read it back."""
    functions = folder.with_name(f"{folder.name}-functions")
    functions.mkdir()
    (functions / "slow.py").write_text(SLOW_REWARD)
    (functions / "tools.py").write_text(TOOLS)
    overrides = [text.format(folder=functions, cores=usable_cores()) for text in SCENARIOS[name]]
    overrides += [f"run.seed={next(seeds)}", f"staleness.policy={policy}", f"run.num_steps={num_steps}"]
    made = run(BASE, overrides, folder).folder
    recording = read_recording(made)
    steps = read_steps(made)
    drift = _drift(recording, [row.at_s for row in steps])
    train_cpu_s = statistics.fmean(row.metrics.get("perf/train_cpu_time") or 0.0 for row in steps[len(steps) // 5 :])
    return Arm(recording, load_modelled(made / SCENARIO_FILE)[0], drift, train_cpu_s)


def _drift(recording: Recording, times_s: Sequence[float]) -> float:
    max_staleness = recording.scenario.staleness.max_staleness
    assert max_staleness is not None, "recorded scenarios are resolved"
    stretch = stretch_of(len(times_s), max_staleness)
    if stretch is None:
        raise UserFault(f"--steps: {len(times_s)} are too few for a steady part")
    first, last = stretch
    middle = (first + last) // 2
    halves = [(times_s[b] - times_s[a]) / (b - a) for a, b in ((first, middle), (middle, last))]
    return (halves[1] - halves[0]) / statistics.fmean(halves)


def of_the_moment(models: Models, own: Models) -> Models:
    """The models of a run, with its decode passes at full slots divided as in others."""
    names, count = ("token_s", "token_load_s", "context_token_s"), own.most_running
    held = count * (own.engines.prompt_tokens + own.engines.response_tokens_median / 2)
    parts, own_parts = ([getattr(each.engines, name) for name in names] for each in (models, own))
    full_s, own_full_s = (each[0] + (count - 1) * each[1] + held * each[2] for each in (parts, own_parts))
    scaled = {name: part * own_full_s / full_s for name, part in zip(names, parts, strict=True)}
    return replace(own, engines=replace(own.engines, **scaled))


class Slower(NamedTuple):
    """CPU time of the same work in one run ÷ that in another."""

    passes: float
    steps: float


def slower(arm: Arm, than: Arm) -> Slower | None:
    """By what the machine was slower; None where engines or learner of either have not told of their CPU time."""
    own, others = (added_up(each.recording.bands) for each in (arm, than))
    pass_s = {band.least: band.seconds / band.passes for band in others if band.wall_s}
    both = [band for band in own if band.wall_s and band.least in pass_s]
    if not both or not arm.train_cpu_s or not than.train_cpu_s:
        return None
    alike_s = sum(band.passes * pass_s[band.least] for band in both)
    return Slower(sum(band.seconds for band in both) / alike_s, arm.train_cpu_s / than.train_cpu_s)


def at_speed(models: Models, by: Slower) -> Models:
    """The models on a machine that is so much slower."""
    of_engines = ("token_s", "token_load_s", "context_token_s", "prefill_s", "prefill_token_s", "apply_weights_s")
    of_learner = ("step_s", "token_s", "micro_batch_s", "publish_s")
    engines, learner = models.engines, models.learner
    return replace(
        models,
        engines=replace(engines, **{name: by.passes * getattr(engines, name) for name in of_engines}),
        learner=replace(learner, **{name: by.steps * getattr(learner, name) for name in of_learner}),
    )


class Played(NamedTuple):
    """What models predict: means over the seeds."""

    step_s: float
    engines_busy: float
    learner_busy: float


def predicted(models: Models, arm: Arm) -> Played:
    """Of the scenario of a run."""
    seen = [play(models.applied(arm.modelled), seed) for seed in SEEDS]
    figures = (
        [each.step_s for each in seen],
        [each.engines_busy for each in seen],
        [each.learner_busy for each in seen],
    )
    return Played(*map(statistics.fmean, figures))


def compared(name: str, fitted_on: str, arms: Mapping[str, Sequence[Arm]]) -> tuple[list[Figure], list[Claim]]:
    """Errors of one scenario, by policy; ``arms`` has its repetitions by policy."""
    models = [calibrate([arm.recording]) for arm in arms[fitted_on]]
    found: list[Figure] = []
    claims: list[Claim] = []
    for policy, runs in arms.items():
        measured = [arm.steady for arm in runs]
        pairs = list(zip(map(predicted, models, runs), measured, strict=True))
        what = f"{name}, {policy}" + (" (fitted)" if policy == fitted_on else "")
        step = [p.step_s / m.step_s - 1 for p, m in pairs]
        busy = [max((p.engines_busy - m.engines_busy, p.learner_busy - m.learner_busy), key=abs) for p, m in pairs]
        times = [each.step_s for each in measured]
        found += [
            plain_figure(f"{what}: step", "s", times),
            plain_figure(f"{what}: noise of the step", "of its mean", [t / statistics.fmean(times) - 1 for t in times]),
            plain_figure(f"{what}: noise within a run, its halves", "of the step", [arm.drift for arm in runs]),
            plain_figure(f"{what}: error of the step", "of the measured", step),
            plain_figure(f"{what}: error of the busy shares, the larger", "of the time", busy),
        ]
        if policy != fitted_on:
            own = [of_the_moment(each, calibrate([arm.recording])) for each, arm in zip(models, runs, strict=True)]
            of_decode = [p.step_s / m.step_s - 1 for p, m in zip(map(predicted, own, runs), measured, strict=True)]
            found.append(plain_figure(f"{what}: error of the step, of decode alone", "of the measured", of_decode))
            at_its_speed, figures = of_the_machine(what, models, arms[fitted_on], runs)
            found += figures
            left = [abs(each) for each in at_its_speed or step]
            where = ", at its speed" if at_its_speed else ""
            claims.append(claim(f"{what}: |error of the step{where}|", left, at_most=MOST))
            claims.append(claim(f"{what}: |error of the busy shares|", [abs(each) for each in busy], at_most=MOST))
    return found, claims


def of_the_machine(
    what: str, models: Sequence[Models], fitted: Sequence[Arm], runs: Sequence[Arm]
) -> tuple[list[float], list[Figure]]:
    """The errors that are left without what the machine was slower by in the predicted runs, and figures of both;
    nothing where a run does not tell."""
    told = [slower(arm, than) for arm, than in zip(runs, fitted, strict=True)]
    by = [each for each in told if each is not None]
    if len(by) < len(told):
        return [], []
    played = [predicted(at_speed(m, b), arm) for m, b, arm in zip(models, by, runs, strict=True)]
    errors = [p.step_s / arm.steady.step_s - 1 for p, arm in zip(played, runs, strict=True)]
    return errors, [
        plain_figure(f"{what}: CPU time of a pass", "of the fitted run's", [each.passes for each in by]),
        plain_figure(f"{what}: CPU time of training", "of the fitted run's", [each.steps for each in by]),
        plain_figure(f"{what}: error of the step, at its speed", "of the measured", errors),
    ]


def measure(given: argparse.Namespace) -> Measured:
    """Record every scenario under every policy in turn, then calibrate and predict."""
    names = given.scenarios.split(",")
    if unknown := sorted(set(names) - set(SCENARIOS)):
        raise UserFault(f"--scenarios: {', '.join(unknown)}: there are {', '.join(SCENARIOS)}")
    keys = [(name, policy) for name in names for policy in POLICIES]
    seeds = (repetition for repetition in range(given.repetitions) for _ in keys)
    acts = {f"{name}, {policy}": partial(record, name, policy, given.steps, seeds) for name, policy in keys}
    turns = in_folders(acts, given.repetitions)
    found: list[Figure] = []
    claims: list[Claim] = []
    for name in names:
        arms = {policy: [turn.value for turn in turns[f"{name}, {policy}"]] for policy in POLICIES}
        of_scenario = compared(name, given.fitted_on, arms)
        found += of_scenario[0]
        claims += of_scenario[1]
    others = "CPU time of processes that actors start: sandboxes, workers of rewards, servers"
    return Measured(found, claims, ("GPUs", others))


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--steps", type=int, default=30)
    benchmark.option("--scenarios", default=",".join(DEFAULT), help=f"with commas, of {', '.join(SCENARIOS)}")
    benchmark.option("--fitted-on", choices=POLICIES, default="fully_async", help="policy of the runs to calibrate on")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
