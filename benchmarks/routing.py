"""What binding samples to engines costs: a synchronous step takes at most 3 % longer than with the best routing.

How it is measured:

* On the virtual clock, with modelled engines and nothing else that takes time: a step is its generation. Groups of 8,
  engines of 46 slots; a load of 2 rounds are twice as many samples as all engines have slots.
* The best routing is list scheduling (Graham, SIAM J. Appl. Math. 17(2), 1969): one queue for all engines, whose slots
  take the next sample when they become free, without a way there and back. It is the same scenario with
  ``prompt_source: {routing: least_loaded, max_load: 1}`` over links that take no time. Where prompts cost something
  (``--prompt-s``) they cost it an eighth of that, as if each were read once for its group wherever it is.
* Ratios are of runs with the same seed, and so with the same lengths. Below 1 is chance: another order of the same
  samples.
* Simulations take turns on no clock but their own, so as many run at once as there are cores, and what else the machine
  does changes no figure. Of 64 engines one comparison is 170,000 to 430,000 events; where its time goes is flat: no
  function has a twentieth of it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.benchmarks._harness import Benchmark, Measured, claim, plain_figure
from penstock.benchmarks._progress import say
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.prediction.workers import Workers, usable_cores
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    import argparse

QUICK: Final = ("--engines", "1", "3", "8", "--rounds", "1", "2")
QUICK_S: Final = 35
MOST: Final = 1.03
GROUP_SIZE: Final = 8
NUM_SLOTS: Final = 46
PROMPT_TOKENS: Final = 64
NUM_STEPS: Final = 3
NO_WAY: Final = LinkModel(min_delay_s=0.0, max_delay_s=0.0)
SCENARIO: Final = f"""\
run: {{name: routing, num_steps: {NUM_STEPS}}}
model: {{max_context: 16384}}
data: {{path: "lines:1000000"}}
sampling: {{samples_per_group: {GROUP_SIZE}, max_response_tokens: 8192}}
filter: {{drop_zero_spread: false}}
staleness: {{policy: sync}}
engines:
  backend: simulated
  slots: {NUM_SLOTS}
  progress_tokens: 8192
  simulated:
    prompt_tokens: {PROMPT_TOKENS}
    response_tokens_median: 400
    token_s: 0.01
    prefill_s: 0
    apply_weights_s: 0
    fetch_weights_s: 0
learner: {{backend: simulated, simulated: {{step_s: 0, publish_s: 0}}}}
runtime: {{settle_delay_s: 0.02}}
observability: {{report: false}}
"""


def step_s(file: Path, overrides: tuple[str, ...], *, prompt_s: float, link: LinkModel | None = None) -> float:
    """Virtual seconds of a step.

    Raises:
        RuntimeError: the run did not complete.
    """
    reading = f"engines.simulated.prefill_token_s={prompt_s / PROMPT_TOKENS}"
    ending = Simulation(load_scenario(file, (*overrides, reading)), link=link).run()
    if not ending.completed:
        raise RuntimeError(f"the simulation did not complete: {ending.story}")
    return ending.at_s / NUM_STEPS


class Comparison(NamedTuple):
    """A routing beside the best one, on the same load: what one process does."""

    file: Path
    """The scenario."""
    routing: str
    max_load: float
    prompt_s: float
    """For reading a prompt."""
    num_engines: int
    sigma: float
    """Of the logarithm of the lengths."""
    rounds: float
    """Of all slots, a step."""
    seed: int
    """Of lengths and delays."""

    @property
    def load(self) -> str:
        return f"{self.num_engines} engines, sigma {self.sigma:g}, {self.rounds:g} rounds"


def ratio(asked: Comparison) -> float:
    """A step, relative to that of the best routing."""
    overrides = (
        f"run.seed={asked.seed}",
        f"engines.count={asked.num_engines}",
        f"engines.simulated.response_tokens_sigma={asked.sigma}",
        f"learner.groups_per_batch={round(asked.num_engines * NUM_SLOTS * asked.rounds / GROUP_SIZE)}",
    )
    listed = ("prompt_source.routing=least_loaded", "prompt_source.max_load=1")
    best_s = step_s(asked.file, (*overrides, *listed), prompt_s=asked.prompt_s / GROUP_SIZE, link=NO_WAY)
    chosen = (f"prompt_source.routing={asked.routing}", f"prompt_source.max_load={asked.max_load}")
    return step_s(asked.file, (*overrides, *chosen), prompt_s=asked.prompt_s) / best_s


def measure(given: argparse.Namespace) -> Measured:
    """Every load with every seed, side by side; those of most events first, so that no core is left with one at the
    end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(SCENARIO)
        asked = [
            Comparison(file, given.routing, given.max_load, given.prompt_s, *load, seed)
            for load in itertools.product(given.engines, given.sigma, given.rounds)
            for seed in range(given.repetitions)
        ]
        asked.sort(key=lambda each: -each.num_engines * each.rounds)
        num_done = itertools.count(1)

        def told() -> None:
            say(f"{next(num_done)} of {len(asked)}, {given.processes} at once")

        with Workers(given.processes) as workers:
            ratios = workers.map(ratio, asked, on_done=told)
    found: dict[str, list[float]] = {}
    for each, value in sorted(zip(asked, ratios, strict=True)):
        found.setdefault(each.load, []).append(value)
    figures = [plain_figure(load, "steps of the best routing", values) for load, values in found.items()]
    worst = max(found, key=lambda load: statistics.fmean(found[load]))
    wanted = partial(claim, f"step ÷ that of the best routing, {worst}", at_most=MOST)
    return Measured(figures, [] if given.prompt_s else [wanted(found[worst])])


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--engines", type=int, nargs="+", default=[1, 2, 3, 8, 64])
    benchmark.option("--sigma", type=float, nargs="+", default=[0.05, 0.3, 0.8], help="of the logarithm of lengths")
    benchmark.option("--rounds", type=float, nargs="+", default=[1.0, 2.0, 2.5], help="of all slots, a step")
    benchmark.option("--prompt-s", type=float, default=0.0, help="for reading a prompt, while nothing is decoded")
    benchmark.option("--routing", default="prefix_affine")
    benchmark.option("--max-load", type=float, default=1.5)
    benchmark.option("--processes", type=int, default=usable_cores(), help="that simulate at once (default: all cores)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
