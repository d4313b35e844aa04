"""What evaluating every 20 steps on two datasets costs training in ``fully_async``, beyond its own tokens.

How it is measured:

* Two arms, with and without the ``evaluation:`` block, otherwise the same: training samples the same tokens in both,
  because its groups, seeds and prompts do not depend on evaluations.
* Throughput is that of useful tokens, trained and evaluated, a second, up to the last step. The cost is what the arm
  with evaluation lacks of the other's: 0 means that evaluation took from training what its own tokens take and no more.
  Where the learner binds, evaluation can be free, and the cost is below 0.
* On the virtual clock the arms are exact: the same seed gives the same figures on every machine. With ``--real`` the
  quickstart's task is trained with the embedded engine and learner, arms in turn; medians over the repetitions. The
  last evaluation is over before the last step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.benchmarks._progress import repeated
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.samples import TerminalState
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.summary import trained_tokens
from penstock.runtime.scenario.load import scenario_from
from penstock.runtime.scenario.source import Place, Source

QUICK: Final = ("--seeds", "1")
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


def real_cost(*, repetitions: int, num_steps: int) -> Cost:
    """With the embedded engine and learner; arms in turn, medians."""
    arms: dict[str, list[Arm]] = {WITHOUT: [], EVALUATING: []}
    with tempfile.TemporaryDirectory() as parent:
        for repetition, name in repeated(repetitions, arms):
            overrides = (f"run.num_steps={num_steps}", *(REAL_EVALUATION if name == EVALUATING else ()))
            arms[name].append(_real_arm(run(REAL, overrides, Path(parent) / f"{repetition}-{name}")))
    return Cost(without=_median(arms[WITHOUT]), evaluating=_median(arms[EVALUATING]))


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


def _median(arms: list[Arm]) -> Arm:
    fields = {name: statistics.median(getattr(arm, name) for arm in arms) for name in Arm.__struct_fields__}
    return Arm(
        wall_s=fields["wall_s"],
        trained_tokens=int(fields["trained_tokens"]),
        evaluated_tokens=int(fields["evaluated_tokens"]),
        num_evaluations=int(fields["num_evaluations"]),
    )


def _print(costs: dict[str, Cost], console: Console) -> None:
    table = Table(title="evaluation every 20 steps on two datasets, fully_async")
    for heading in ("arm", "evaluations", "evaluated tokens", "training slower by", "beyond its tokens"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=heading == "arm")
    for name, cost in costs.items():
        table.add_row(
            name,
            str(cost.evaluating.num_evaluations),
            f"{cost.evaluated_share:.1%}",
            f"{cost.slowdown:.1%}",
            f"{cost.beyond_tokens:.1%}",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(prog="penstock bench evaluation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of the virtual clock")
    parser.add_argument("--real", action="store_true", help="also with the embedded engine and learner")
    parser.add_argument("--repetitions", type=int, default=3, help="of the real arms")
    parser.add_argument("--steps", type=int, default=70, help="of the real arms")
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    costs = {
        f"virtual, {binds} bind, seed {seed}": virtual_cost(binds, seed=seed)
        for seed, binds in repeated(options.seeds, BINDS)
    }
    if options.real:
        costs["real"] = real_cost(repetitions=options.repetitions, num_steps=options.steps)
    _print(costs, Console())
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(costs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
