"""Busy fractions of engine and learner under the staleness policies and update modes, on the same sampled tokens.

How it is measured:

* ``penstock run`` with the embedded engine and learner. The learning rate is too small to change a float32 weight by
  anything that shows, and a sample's seed depends on its group and index only: so all arms sample the same tokens.
* Times are of the steps after the first fifth. The busy seconds of engine and learner a step are Tg and Tt; the bound
  beside each arm is that of :func:`bound_of` for its policy with the Tg and Tt of the synchronous arm. *Its own* bound
  has those of the arm itself, which are longer where engine and learner share caches and cores: the rest of the step is
  what neither the work nor the machine but the policy and Penstock cost.
* Beside it stand the share of all cores that the processes used (Ray's own aside) and the CPU time of what neither
  generates nor trains: where that share is near 1, no policy and no η makes a step shorter, only less work does.
* The speed-up over the synchronous arm stands beside the most that its busy times leave room for:
  (Tg + Tt) ÷ max(Tg, Tt).
* The arms take turns. With a larger ``--model`` what neither generates nor trains is a smaller part of a step.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.benchmarks._harness import Benchmark, Measured, figures, in_folders, pairs, plain_figure
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import LEARNER, Role, is_engine
from penstock.messages.training import Activity

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

QUICK: Final = ("--repetitions", "1", "--steps", "10", "--arms", "one_step_off", "fully_async, η 4")
QUICK_S: Final = 60
CORES: Final = len(os.sched_getaffinity(0))
TUNED: Final = "sync, all cores"
ARMS: Final = {
    "sync": ("staleness.policy=sync",),
    TUNED: ("staleness.policy=sync", f"engines.num_threads={CORES}", f"learner.num_threads={CORES}"),
    "one_step_off": ("staleness.policy=one_step_off",),
    "fully_async": ("staleness.policy=fully_async",),
    "fully_async, η 4": ("staleness.policy=fully_async", "staleness.max_staleness=4"),
    "fully_async, interrupt": ("staleness.policy=fully_async", "staleness.update_mode=interrupt"),
    "fully_async, drain": ("staleness.policy=fully_async", "staleness.update_mode=drain"),
}
"""By name: the policy, and what follows on it. Without more, ``fully_async`` has an η of 2 and swaps in flight, and
engine and learner have a thread each; where they take turns, either may have all cores."""
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
    cpu_s: float
    """Of all processes but Ray's own."""
    light_cpu_s: float
    """Of those that neither generate nor train."""


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

    cpu_s = {role: (total_s - first.cpu_s.get(role, 0.0)) / num_steps for role, total_s in last.cpu_s.items()}
    return Arm(
        step_s=(last.at_s - first.at_s) / num_steps,
        engine_busy_s=busy(is_engine),
        engine_occupied_s=busy(is_engine, weighted=True),
        learner_busy_s=busy(LEARNER.__eq__),
        cpu_s=sum(cpu_s.values()),
        light_cpu_s=sum(seconds for role, seconds in cpu_s.items() if role not in (Role.ENGINE_WORKER, Role.LEARNER)),
    )


def bound_of(arm: str, sync: Arm) -> float:
    """Best step time under the policy of an arm, from the busy times of the synchronous one: there engine and learner
    take turns, so its busy times hold what a batch needs, the tail of the longest response included."""
    generate_s, train_s = sync.engine_busy_s, sync.learner_busy_s
    if arm in ("sync", TUNED):
        return generate_s + train_s
    return max(generate_s if arm == "one_step_off" else sync.engine_occupied_s, train_s)


def measure(given: argparse.Namespace) -> Measured:
    """The arms in turn; each share and ratio is of runs that were made one after the other."""

    def arm(overrides: Sequence[str], folder: Path) -> Arm:
        return arm_of(run(SCENARIO, (*overrides, f"run.num_steps={given.steps}", f"model.make={given.model}"), folder))

    arms = {name: overrides for name, overrides in ARMS.items() if name in ("sync", *given.arms)}
    turns = in_folders({name: partial(arm, overrides) for name, overrides in arms.items()}, given.repetitions)
    syncs = [turn.value for turn in turns["sync"]]
    steps = figures(turns, "s a step", lambda arm: arm.step_s)
    found = [
        *steps,
        *figures(turns, "share of the step", lambda arm: arm.engine_busy_s / arm.step_s, "{}: engine busy"),
        *figures(turns, "share of the step", lambda arm: arm.learner_busy_s / arm.step_s, "{}: learner busy"),
        *figures(turns, "share of all cores", lambda arm: arm.cpu_s / (arm.step_s * CORES), "{}: cores in use"),
        *figures(turns, "CPU-s a step", lambda arm: arm.light_cpu_s, "{}: neither engine nor learner"),
    ]
    by_name = dict(zip(arms, steps, strict=True))
    for name, step in by_name.items():
        reached = [bound_of(name, sync) / step_s for sync, step_s in zip(syncs, step.values, strict=True)]
        found.append(plain_figure(f"{name}: bound ÷ step", "share", reached))
        own = [bound_of(name, turn.value) / turn.value.step_s for turn in turns[name]]
        found.append(plain_figure(f"{name}: its own bound ÷ step", "share", own))
        found.extend(
            plain_figure(f"{name}: step of {other} ÷ step", "×", pairs(by_name[other], step))
            for other in ("sync", TUNED)
            if other in by_name
        )
    ceiling = [bound_of("sync", sync) / bound_of("one_step_off", sync) for sync in syncs]
    found.append(plain_figure("ceiling of step of sync ÷ step", "×", ceiling))
    return Measured(found, [], ("use of GPUs (NVML)",))


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--steps", type=int, default=30)
    benchmark.option(
        "--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), metavar="ARM", help="beside sync (default: all)"
    )
    benchmark.option("--model", choices=("s", "m"), default="s", help="that is made (default: s)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
