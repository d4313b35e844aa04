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
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.benchmarks._harness import Benchmark, Measured, claim, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    import argparse

QUICK: Final = ("--engines", "1", "2", "3", "--repetitions", "2")
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


def ratio(file: Path, given: argparse.Namespace, case: tuple[int, float, float], seed: int) -> float:
    """A step, relative to that of the best routing.

    Args:
        file: of the scenario.
        given: the command line.
        case: engines, sigma of the logarithm of the lengths, rounds of all slots.
        seed: of lengths and delays.
    """
    num_engines, sigma, rounds = case
    overrides = (
        f"run.seed={seed}",
        f"engines.count={num_engines}",
        f"engines.simulated.response_tokens_sigma={sigma}",
        f"learner.groups_per_batch={round(num_engines * NUM_SLOTS * rounds / GROUP_SIZE)}",
    )
    listed = ("prompt_source.routing=least_loaded", "prompt_source.max_load=1")
    best_s = step_s(file, (*overrides, *listed), prompt_s=given.prompt_s / GROUP_SIZE, link=NO_WAY)
    asked = (f"prompt_source.routing={given.routing}", f"prompt_source.max_load={given.max_load}")
    return step_s(file, (*overrides, *asked), prompt_s=given.prompt_s) / best_s


def measure(given: argparse.Namespace) -> Measured:
    """Every case with every seed."""
    cases = [(count, sigma, rounds) for count in given.engines for sigma in given.sigma for rounds in given.rounds]
    found: dict[tuple[int, float, float], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(SCENARIO)
        rounds = [(case, seed) for seed in range(given.repetitions) for case in cases]
        for case, seed in in_turn(rounds, lambda each: f"{_name(each[0])}, seed {each[1]}"):
            found[case].append(ratio(file, given, case, seed))
    figures = [plain_figure(_name(case), "steps of the best routing", values) for case, values in found.items()]
    means = [sum(values) / len(values) for values in found.values()]
    worst = max(range(len(cases)), key=means.__getitem__)
    wanted = partial(claim, f"step ÷ that of the best routing, {_name(cases[worst])}", at_most=MOST)
    return Measured(figures, [] if given.prompt_s else [wanted(found[cases[worst]])])


def _name(case: tuple[int, float, float]) -> str:
    return f"{case[0]} engines, sigma {case[1]:g}, {case[2]:g} rounds"


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--engines", type=int, nargs="+", default=[1, 2, 3, 8, 64])
    benchmark.option("--sigma", type=float, nargs="+", default=[0.05, 0.3, 0.8], help="of the logarithm of lengths")
    benchmark.option("--rounds", type=float, nargs="+", default=[1.0, 2.0, 2.5], help="of all slots, a step")
    benchmark.option("--prompt-s", type=float, default=0.0, help="for reading a prompt, while nothing is decoded")
    benchmark.option("--routing", default="prefix_affine")
    benchmark.option("--max-load", type=float, default=1.5)
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
