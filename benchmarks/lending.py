"""When it pays to lend an idle learner's device to an engine: steps an hour with and without, on the virtual clock.

How it is measured:

* Three devices: two engines that take about 45 s for a batch, and a learner that trains for so long (``--train-s``).
  ``lent`` is ``engines.lent: 1`` under ``scale: by_bound``, which lends and stops by what it reads; ``without`` is the
  same without these. Beside them what else could be had: ``colocated``, all three devices in turns under
  ``one_step_off``, and a fourth device, ``an engine more``, which is the most that lending could come to.
* A hand-over of so many seconds (``--hand-over-s``) is what all that happens between two uses of the device takes: the
  learner's sleep, the fetch, waking and loading of weights, the engine's sleep, the learner's waking, in the shares 2,
  2, 1, 1, 1, 2 of 9. What is broken off is prefilled again elsewhere.
* Steps an hour are of the last :data:`STEADY` steps: after readings, trials, and whatever these led to.
* Simulations take turns on no clock but their own, so as many run at once as there are cores, and what else the machine
  does changes no figure.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.benchmarks._harness import Benchmark, Measured, claim, plain_figure
from penstock.benchmarks._progress import say
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.prediction.workers import Workers, usable_cores
from penstock.runtime.scenario.load import load_scenario
from penstock.runtime.scenario.resolve import resolve

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks._results import Figure

QUICK: Final = ("--train-s", "5", "--hand-over-s", "9")
QUICK_S: Final = 60
NUM_STEPS: Final = 60
STEADY: Final = 24
LEAST_GAIN: Final = 1.1
"""Where the learner waits most."""
MOST_LOSS: Final = 0.95
SCENARIO: Final = f"""\
run: {{name: lending, num_steps: {NUM_STEPS}}}
model: {{max_context: 16384}}
data: {{path: "lines:1000000"}}
sampling: {{samples_per_group: 8, max_response_tokens: 2048}}
reward: {{function: lines}}
filter: {{drop_zero_spread: false}}
staleness: {{policy: fully_async, max_staleness: 4}}
engines:
  backend: simulated
  count: 2
  slots: 8
  progress_tokens: 2048
  simulated: {{response_tokens_median: 600, response_tokens_sigma: 0.5, token_s: 0.015, start_s: 20}}
learner: {{backend: simulated, groups_per_batch: 8, save_every: 100, simulated: {{publish_s: 1}}}}
observability: {{report: false}}
"""
WITHOUT: Final = "without"
LENT: Final = "lent"
ARMS: Final[dict[str, tuple[str, ...]]] = {
    WITHOUT: (),
    LENT: (
        "engines.min=2",
        "engines.max=3",
        "engines.lent=1",
        "engines.scale=by_bound",
        "engines.scale_hold_s=120",
    ),
    "colocated": (
        "engines.count=3",
        "engines.placement=colocate",
        "staleness.policy=one_step_off",
        "staleness.max_staleness=1",
        "staleness.update_mode=interrupt",
    ),
    "an engine more": ("engines.count=3",),
}
SHARES: Final = {
    "learner.simulated.sleep_s": 2,
    "engines.simulated.fetch_weights_s": 2,
    "engines.simulated.wake_s": 1,
    "engines.simulated.apply_weights_s": 1,
    "engines.simulated.sleep_s": 1,
    "learner.simulated.wake_s": 2,
}
"""Of a hand-over, in ninths."""


class Case(NamedTuple):
    """What one process does."""

    file: Path
    """The scenario."""
    train_s: float
    hand_over_s: float
    arm: str
    seed: int

    @property
    def load(self) -> str:
        return f"{self.train_s:g} s of training, hand-over {self.hand_over_s:g} s"


def steps_per_hour(case: Case) -> float:
    """Of the last steps of the run.

    Raises:
        RuntimeError: the run did not complete.
    """
    overrides = [f"run.seed={case.seed}", f"learner.simulated.step_s={case.train_s}", *ARMS[case.arm]]
    overrides += [f"{key}={case.hand_over_s * share / 9}" for key, share in SHARES.items()]
    simulation = Simulation(resolve(load_scenario(case.file, overrides)), with_digest=False, may_lose=False)
    ending = simulation.run()
    if not ending.completed:
        raise RuntimeError(f"the simulation did not complete: {ending.story}")
    times = simulation.accounts.step_times
    return 3600 * STEADY / (times[-1] - times[-1 - STEADY])


def measure(given: argparse.Namespace) -> Measured:
    """Every arm under every load with every seed, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(SCENARIO)
        asked = [
            Case(file, train_s, hand_over_s, arm, seed)
            for train_s, hand_over_s in itertools.product(given.train_s, given.hand_over_s)
            for arm in ARMS
            for seed in range(given.repetitions)
        ]
        num_done = itertools.count(1)

        def told() -> None:
            say(f"{next(num_done)} of {len(asked)}, {given.processes} at once")

        with Workers(given.processes) as workers:
            found = dict(zip(asked, workers.map(steps_per_hour, asked, on_done=told), strict=True))
    figures: list[Figure] = []
    ratios: dict[str, list[float]] = {}
    for case, value in found.items():
        if case.seed == 0:
            values = [found[case._replace(seed=seed)] for seed in range(given.repetitions)]
            figures.append(plain_figure(f"{case.load}: {case.arm}", "steps/h", values))
        if case.arm == LENT:
            ratios.setdefault(case.load, []).append(value / found[case._replace(arm=WITHOUT)])
    figures += [plain_figure(f"{load}: lent ÷ without", "", values) for load, values in ratios.items()]
    most = Case(file, min(given.train_s), min(given.hand_over_s), LENT, 0).load
    worst = min(ratios, key=lambda load: sum(ratios[load]))
    told_of = partial(claim, f"steps with lending ÷ without, {most}", at_least=LEAST_GAIN)
    no_loss = partial(claim, f"steps with lending ÷ without, {worst}", at_least=MOST_LOSS)
    return Measured(figures, [told_of(ratios[most]), no_loss(ratios[worst])])


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--train-s", type=float, nargs="+", default=[5.0, 20.0, 35.0, 60.0], help="of a step")
    benchmark.option(
        "--hand-over-s", type=float, nargs="+", default=[3.0, 9.0, 27.0], help="between two uses of the device"
    )
    benchmark.option("--processes", type=int, default=usable_cores(), help="that simulate at once (default: all cores)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
