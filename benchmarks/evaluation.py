"""What evaluating every 20 steps on two datasets costs training in ``fully_async``, beyond its own tokens.

How it is measured:

* Two arms, with and without the ``evaluation:`` block, otherwise the same: training samples the same tokens in both,
  because its groups, seeds and prompts do not depend on evaluations.
* Throughput is that of useful tokens, trained and evaluated, a second, up to the last step. The cost is what the arm
  with evaluation lacks of the other's: 0 means that evaluation took from training what its own tokens take and no more.
  Where the learner binds, evaluation can be free, and the cost is below 0.
* On the virtual clock the arms are exact: the same seed gives the same figures on every machine. With ``--real`` the
  quickstart's task is trained with the embedded engine and learner, arms in turn. The
  last evaluation is over before the last step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.benchmarks._harness import Benchmark, Measured, in_folders, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.samples import TerminalState
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.summary import trained_tokens
from penstock.runtime.scenario.load import scenario_from
from penstock.runtime.scenario.source import Place, Source

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from penstock.benchmarks._results import Figure

QUICK: Final = ("--seeds", "1")
QUICK_S: Final = 20
VIRTUAL: Final = {
    "run": {"name": "evaluation", "num_steps": 70},
    "model": {"max_context": 8192},
    "data": {"path": "lines:100000"},
    "sampling": {"samples_per_group": 8, "max_response_tokens": 4096},
    "staleness": {"policy": "fully_async", "max_staleness": 4},
    "engines": {
        "backend": "simulated",
        "count": 2,
        "slots": 16,
        "simulated": {"response_tokens_median": 400, "response_tokens_sigma": 0.8, "token_s": 0.01},
    },
    "learner": {"backend": "simulated", "groups_per_batch": 8},
}
BINDS: Final = {"engines": 1.0, "learner": 30.0}
"""What binds → seconds of a training step."""
EVALUATION: Final = {
    "every": 20,
    "datasets": [
        {"name": "first", "path": "lines:16", "samples_per_prompt": 4},
        {"name": "second", "path": "lines:32", "samples_per_prompt": 1},
    ],
}
REAL: Final = """\
run: {name: evaluation, num_steps: 70}
model: {make: s}
data: {path: "lines:4000"}
sampling: {samples_per_group: 8, max_response_tokens: 128}
reward: {function: lines}
filter: {drop_zero_spread: false}
staleness: {policy: fully_async}
learner:
  groups_per_batch: 16
  learning_rate: 1.0e-12
  warm_start: {path: "lines:4000", num_steps: 150}
observability: {report: false}
"""
REAL_EVALUATION: Final = (
    "evaluation.every=20",
    'evaluation.datasets=[{name: first, path: "lines:64"}, {name: second, path: "lines:16", samples_per_prompt: 4}]',
)


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One run, up to its last step."""

    wall_s: float
    trained_tokens: int
    evaluated_tokens: int
    num_evaluations: int

    @property
    def tokens_per_s(self) -> float:
        """Trained and evaluated."""
        return (self.trained_tokens + self.evaluated_tokens) / self.wall_s


WITHOUT: Final = "without"
EVALUATING: Final = "evaluating"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Both arms of one comparison."""

    without: Arm
    evaluating: Arm

    @property
    def slowdown(self) -> float:
        """Share of the training throughput that evaluation takes, its tokens included."""
        return 1 - (self.evaluating.trained_tokens / self.evaluating.wall_s) / self.without.tokens_per_s

    @property
    def evaluated_share(self) -> float:
        """Of the useful tokens, those that were evaluated."""
        evaluated = self.evaluating.evaluated_tokens
        return evaluated / (evaluated + self.evaluating.trained_tokens)

    @property
    def beyond_tokens(self) -> float:
        """Share that it takes beyond the tokens that it generates."""
        return 1 - self.evaluating.tokens_per_s / self.without.tokens_per_s


def virtual_cost(binds: str, *, seed: int = 0, num_steps: int = 70) -> Cost:
    """On the virtual clock, where engines or the learner bind."""
    return Cost(
        without=_virtual_arm(binds, seed, num_steps, evaluates=False),
        evaluating=_virtual_arm(binds, seed, num_steps, evaluates=True),
    )


def _virtual_arm(binds: str, seed: int, num_steps: int, *, evaluates: bool) -> Arm:
    data = msgspec.json.decode(msgspec.json.encode(VIRTUAL | ({"evaluation": EVALUATION} if evaluates else {})))
    data["run"] |= {"seed": seed, "num_steps": num_steps}
    data["learner"]["simulated"] = {"step_s": BINDS[binds]}
    simulation = Simulation(scenario_from(Source(data, {(): Place("the benchmark", Path.cwd())})))
    ending = simulation.run()
    if not ending.completed:
        raise RuntimeError(f"the simulation did not complete: {ending.story}")
    finished = simulation.accounts.evaluations.values()
    return Arm(
        wall_s=simulation.accounts.step_times[-1],
        trained_tokens=trained_tokens(simulation.last_word(ending).balance),
        evaluated_tokens=sum(
            sample.num_tokens
            for event in finished
            for dataset in event.datasets
            for row in dataset.rows
            for sample in row.samples
        ),
        num_evaluations=len(finished),
    )


def real_costs(*, repetitions: int, num_steps: int) -> list[Cost]:
    """With the embedded engine and learner; arms in turn."""

    def arm(given: Sequence[str], folder: Path) -> Arm:
        return _real_arm(run(REAL, (f"run.num_steps={num_steps}", *given), folder))

    turns = in_folders({WITHOUT: partial(arm, ()), EVALUATING: partial(arm, REAL_EVALUATION)}, repetitions)
    both = zip(turns[WITHOUT], turns[EVALUATING], strict=True)
    return [Cost(without=without.value, evaluating=evaluating.value) for without, evaluating in both]


def _real_arm(finished: FinishedRun) -> Arm:
    """From the first step on: starts are no part of it."""
    first, last = finished.steps[0], finished.steps[-1]
    return Arm(
        wall_s=last.at_s - first.at_s,
        trained_tokens=trained_tokens(last.balance) - trained_tokens(first.balance),
        evaluated_tokens=sum(
            sum(count.num_tokens for count in row.balance.ended if count.state == TerminalState.EVALUATED) * sign
            for row, sign in ((last, 1), (first, -1))
        ),
        num_evaluations=len(read_evaluations(finished.folder)),
    )


def measure(given: argparse.Namespace) -> Measured:
    """Every arm of the virtual clock with each seed, and the real ones where they are asked for."""
    costs = {
        f"virtual, {binds} bind": [virtual_cost(binds, seed=seed) for seed in range(given.seeds)]
        for binds in in_turn(BINDS)
    }
    if given.real:
        costs["real"] = real_costs(repetitions=given.repetitions, num_steps=given.steps)
    found: list[Figure] = []
    for name, made in costs.items():
        found += [
            plain_figure(f"{name}: evaluations", "a run", [cost.evaluating.num_evaluations for cost in made]),
            plain_figure(f"{name}: evaluated", "share of useful tokens", [cost.evaluated_share for cost in made]),
            plain_figure(f"{name}: training slower by", "share", [cost.slowdown for cost in made]),
            plain_figure(f"{name}: beyond its tokens", "share", [cost.beyond_tokens for cost in made]),
        ]
    return Measured(found, [], () if given.real else ("the embedded engine and learner, which --real adds",))


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--seeds", type=int, default=3, help="of the virtual clock")
    benchmark.option("--real", action="store_true", help="also with the embedded engine and learner")
    benchmark.option("--steps", type=int, default=70, help="of the real arms")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
