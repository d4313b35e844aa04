"""Whether right runs are left in peace: the shipped scenarios for a CPU, shortened, over several seeds.

Engine and learner hold the same weights in each of them, so every alarm about a mismatch, and every publish that an
engine finds wrong, is false.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from penstock import scenarios
from penstock.backends.learners.objectives.mismatch import FRESH_DIFFERENCE, MIXED_DIFFERENCE
from penstock.backends.learners.torch.kept_warm_start import NOT_COMPUTED
from penstock.backends.learners.training.alarms import ALARM
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import LEARNER
from penstock.messages.weights import PublishFailed
from penstock.runtime.observability.segments import files_in, whole_lines
from penstock.runtime.observability.trackers import EVENTS_FOLDER

QUICK: Final = ("sync", "fully_async", "--seeds", "0", "--steps", "4")
QUICK_S: Final = 30
SCENARIOS: Final[dict[str, tuple[str, ...]]] = {
    "sync": (),
    "one_step_off": (),
    "fully_async": (),
    "quickstart": (),
    "calculator": ("learner.warm_start.num_steps=400",),
    "rejection_sampling": (),
    "learner_ranks": (),
}
"""With what shortens them further."""
SHORTENED: Final = ("runtime.host=local", "filter.drop_zero_spread=false", "observability.report=false")
FAILED_PUBLISH: Final = f'"{PublishFailed.__name__}"'.encode()


class Heard(NamedTuple):
    """What a run said about its engine and learner."""

    num_compared: int
    """Steps with a sample that the trained weights have made whole."""
    num_alarms: int
    """Steps with ``train/mismatch_alarm``."""
    num_failed_publishes: int
    """That an engine found wrong by digest, checksum or canary."""
    largest_nats: float
    """Of the steps, mean |learner − engine| on the compared samples."""
    largest_mixed_nats: float
    """The same on samples that weights of several versions have made, which no alarm looks at."""
    warnings: tuple[str, ...]
    """Of the learner; that it took its warm start from the cache is none."""


def heard_in(finished: FinishedRun) -> Heard:
    """Read it from the run's folder."""
    journals = [each for each in files_in(finished.folder / EVENTS_FOLDER) if each.name.startswith("learner-")]

    def values(name: str) -> list[float]:
        return [value for step in finished.steps if (value := step.metrics.get(name)) is not None]

    return Heard(
        num_compared=len(values(FRESH_DIFFERENCE)),
        num_alarms=int(sum(values(ALARM))),
        num_failed_publishes=sum(FAILED_PUBLISH in line.data for file in journals for line in whole_lines(file)),
        largest_nats=max(values(FRESH_DIFFERENCE), default=0.0),
        largest_mixed_nats=max(values(MIXED_DIFFERENCE), default=0.0),
        warnings=tuple(
            text
            for text in finished.summary.warnings
            if text.startswith(f"{LEARNER}:") and not text.startswith(f"{LEARNER}: {NOT_COMPUTED}")
        ),
    )


def main(argv: list[str] | None = None) -> int:
    """Run one after the other and print; 1 where there was an alarm."""
    parser = argparse.ArgumentParser(prog="penstock bench false_alarms", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; all if none is named")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    options = parser.parse_args(argv)
    console, num_false = Console(), 0
    table = Table(title="right runs")
    for heading in ("scenario", "seed", "compared", "alarms", "failed publishes", "largest, nats", "mixed, nats"):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    runs = [(seed, name) for seed in options.seeds for name in options.scenarios or SCENARIOS]
    for seed, name in in_turn(runs, lambda each: f"{each[1]}, seed {each[0]}"):
        overrides = (*SHORTENED, *SCENARIOS[name], f"run.num_steps={options.steps}", f"run.seed={seed}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(scenarios.__path__[0]) / f"{name}.yaml"
            heard = heard_in(run(file, overrides, Path(folder) / "runs"))
        is_false = any((heard.num_alarms, heard.num_failed_publishes, heard.warnings))
        num_false += is_false
        console.print(f"{name}, seed {seed}: {'an alarm' if is_false else 'quiet'}", *heard.warnings, markup=False)
        counts = map(str, (seed, heard.num_compared, heard.num_alarms, heard.num_failed_publishes))
        table.add_row(name, *counts, f"{heard.largest_nats:.2g}", f"{heard.largest_mixed_nats:.2g}")
    console.print(table, f"{num_false} of {table.row_count} with an alarm")
    return int(num_false > 0)


if __name__ == "__main__":
    raise SystemExit(main())
