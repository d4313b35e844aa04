"""Busy fractions of engine and learner under the three staleness policies, on the same sampled tokens.

How it is measured:

* ``penstock run`` with the embedded engine and learner. The learning rate is too small to change a float32 weight by
  anything that shows, and a sample's seed depends on its group and index only: so all arms sample the same tokens.
* Times are of the steps after the first fifth. The busy seconds of engine and learner a step are Tg and Tt; the bound
  beside each arm is that of :func:`bounds` for its policy with the Tg and Tt of the synchronous arm.
* The arms take turns; medians over the repetitions. Where there is a GPU its NVML utilisation stands beside.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.benchmarks._progress import repeated
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK: Final = ("--repetitions", "1", "--steps", "10")
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
    num_trained_tokens: int

    @property
    def engine_busy(self) -> float:
        return self.engine_busy_s / self.step_s

    @property
    def learner_busy(self) -> float:
        return self.learner_busy_s / self.step_s


class UtilisationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions, by policy."""

    arms: dict[str, Arm]
    bound_s: dict[str, float]
    """What theory allows at best, seconds a step."""
    all_step_s: dict[str, list[float]]


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
        num_trained_tokens=sum(sum(step.response_lengths) for step in steps),
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


def measure(*, repetitions: int, num_steps: int) -> UtilisationReport:
    """Run the policies in turn."""
    arms: dict[str, list[Arm]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory() as parent:
        for repetition, policy in repeated(repetitions, POLICIES):
            overrides = (f"staleness.policy={policy}", f"run.num_steps={num_steps}")
            arms[policy].append(arm_of(run(SCENARIO, overrides, Path(parent) / f"{repetition}-{policy}")))
    medians = {policy: _median(found) for policy, found in arms.items()}
    return UtilisationReport(
        arms=medians,
        bound_s=bounds(medians["sync"]),
        all_step_s={policy: [arm.step_s for arm in found] for policy, found in arms.items()},
    )


def _median(arms: list[Arm]) -> Arm:
    fields = {name: statistics.median(getattr(arm, name) for arm in arms) for name in Arm.__struct_fields__}
    return msgspec.convert(fields | {"num_trained_tokens": int(fields["num_trained_tokens"])}, Arm)


def _print(report: UtilisationReport, console: Console) -> None:
    table = Table(title="one engine, one learner, the same sampled tokens")
    for heading in ("policy", "step s", "bound s", "reached", "engine busy", "learner busy", "speed-up"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=heading == "policy")
    slowest = report.arms["sync"].step_s
    for policy, arm in report.arms.items():
        bound = report.bound_s[policy]
        table.add_row(
            policy,
            f"{arm.step_s:.3f}",
            f"{bound:.3f}",
            f"{bound / arm.step_s:.0%}",
            f"{arm.engine_busy:.0%}",
            f"{arm.learner_busy:.0%}",
            f"{slowest / arm.step_s:.2f}×",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(prog="penstock bench utilisation", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    report = measure(repetitions=options.repetitions, num_steps=options.steps)
    _print(report, Console())
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
