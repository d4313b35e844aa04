"""Busy fractions of engine and learner under the three staleness policies, on the same sampled tokens.

How it is measured:

* ``penstock run`` with the embedded engine and learner. The learning rate is too small to change a float32 weight by
  anything that shows, and a sample's seed depends on its group and index only: so all arms sample the same tokens.
* Times are of the steps after the first fifth. The busy seconds of engine and learner a step are Tg and Tt; the bound
  beside each arm is that of :func:`bounds` for its policy with the Tg and Tt of the synchronous arm.
* The arms take turns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.benchmarks._harness import Benchmark, Measured, figures, in_folders, pairs, plain_figure
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

QUICK: Final = ("--repetitions", "1", "--steps", "10")
QUICK_S: Final = 60
POLICIES: Final = ("sync", "one_step_off", "fully_async")
SCENARIO: Final = """\
run: {name: utilisation, num_steps: 30}
model: {make: s}
data: {path: "lines:4000"}
sampling: {samples_per_group: 8, max_response_tokens: 128}
reward: {function: lines}
filter: {drop_zero_spread: false}
learner:
  groups_per_batch: 16
  learning_rate: 1.0e-12
  warm_start: {path: "lines:4000", num_steps: 150}
observability: {report: false}
"""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One run under one policy. Times are seconds a step."""

    step_s: float
    engine_busy_s: float
    engine_occupied_s: float
    """Busy seconds weighted by the share of slots in use."""
    learner_busy_s: float


def arm_of(finished: FinishedRun) -> Arm:
    """Times after the first fifth of the steps."""
    steps = finished.steps
    first, last = steps[len(steps) // 5], steps[-1]
    num_steps = last.version - first.version

    def busy(is_wanted: Callable[[str], bool], *, weighted: bool = False) -> float:
        total = 0.0
        for row in finished.activity:
            if is_wanted(row.actor) and row.activity is Activity.WORKING:
                seconds = max(0.0, min(row.end_s, last.at_s) - max(row.start_s, first.at_s))
                total += seconds * (row.occupancy if weighted else 1.0)
        return total / num_steps

    return Arm(
        step_s=(last.at_s - first.at_s) / num_steps,
        engine_busy_s=busy(is_engine),
        engine_occupied_s=busy(is_engine, weighted=True),
        learner_busy_s=busy(LEARNER.__eq__),
    )


def bounds(sync: Arm) -> dict[str, float]:
    """Best step time by policy, from the busy times of the synchronous arm: there engine and learner take turns, so
    its busy times hold what a batch needs, the tail of the longest response included."""
    generate_s, train_s = sync.engine_busy_s, sync.learner_busy_s
    return {
        "sync": generate_s + train_s,
        "one_step_off": max(generate_s, train_s),
        "fully_async": max(sync.engine_occupied_s, train_s),
    }


def measure(given: argparse.Namespace) -> Measured:
    """The policies in turn; each share and ratio is of runs that were made one after the other."""

    def arm(policy: str, folder: Path) -> Arm:
        return arm_of(run(SCENARIO, (f"staleness.policy={policy}", f"run.num_steps={given.steps}"), folder))

    turns = in_folders({policy: partial(arm, policy) for policy in POLICIES}, given.repetitions)
    bound_s = [bounds(turn.value) for turn in turns["sync"]]
    steps = figures(turns, "s a step", lambda arm: arm.step_s)
    found = [
        *steps,
        *figures(turns, "share of the step", lambda arm: arm.engine_busy_s / arm.step_s, "{}: engine busy"),
        *figures(turns, "share of the step", lambda arm: arm.learner_busy_s / arm.step_s, "{}: learner busy"),
    ]
    for policy, step in zip(POLICIES, steps, strict=True):
        reached = [bound[policy] / step_s for bound, step_s in zip(bound_s, step.values, strict=True)]
        found.append(plain_figure(f"{policy}: bound ÷ step", "share", reached))
        found.append(plain_figure(f"{policy}: step of sync ÷ step", "×", pairs(steps[0], step)))
    return Measured(found, [], ("a synchronous arm tuned to use everything in both phases", "use of GPUs (NVML)"))


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--steps", type=int, default=30)
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
