"""Whether right runs are left in peace: the shipped scenarios for a CPU, shortened, over several seeds.

Engine and learner hold the same weights in each of them, so every alarm about a mismatch, and every publish that an
engine finds wrong, is false.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock import scenarios
from penstock.backends.learners.alarms import ALARM
from penstock.backends.learners.objectives.mismatch import FRESH_DIFFERENCE, MIXED_DIFFERENCE
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import LEARNER

if TYPE_CHECKING:
    from collections.abc import Sequence

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
FAILED_PUBLISH: Final = '"PublishFailed"'


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What a run said about its engine and learner."""

    scenario: str
    seed: int
    num_steps: int
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
    """Of the learner."""

    @property
    def is_false(self) -> bool:
        return bool(self.num_alarms or self.num_failed_publishes or self.warnings)


def heard_in(finished: FinishedRun, scenario: str, seed: int) -> Heard:
    """Read it from the run's folder."""
    journals = (finished.folder / "events").glob("learner-*.jsonl")

    def values(name: str) -> list[float]:
        return [value for step in finished.steps if (value := step.metrics.get(name)) is not None]

    return Heard(
        scenario=scenario,
        seed=seed,
        num_steps=len(finished.steps),
        num_compared=len(values(FRESH_DIFFERENCE)),
        num_alarms=int(sum(values(ALARM))),
        num_failed_publishes=sum(FAILED_PUBLISH in line for file in journals for line in file.read_text().splitlines()),
        largest_nats=max(values(FRESH_DIFFERENCE), default=0.0),
        largest_mixed_nats=max(values(MIXED_DIFFERENCE), default=0.0),
        warnings=tuple(text for text in finished.summary.warnings if text.startswith(f"{LEARNER}:")),
    )


def measure(names: Sequence[str], *, seeds: Sequence[int], num_steps: int, console: Console) -> list[Heard]:
    """One run after the other."""
    found: list[Heard] = []
    with tempfile.TemporaryDirectory() as parent:
        for seed in seeds:
            for name in names:
                overrides = (*SHORTENED, *SCENARIOS[name], f"run.num_steps={num_steps}", f"run.seed={seed}")
                file = Path(scenarios.__path__[0]) / f"{name}.yaml"
                heard = heard_in(run(file, overrides, Path(parent) / f"{name}-{seed}"), name, seed)
                found.append(heard)
                console.print(f"{name}, seed {seed}: {'an alarm' if heard.is_false else 'quiet'}")
                for text in heard.warnings:
                    console.print(f"  {text}", markup=False)
    return found


def _print(found: Sequence[Heard], console: Console) -> None:
    table = Table(title=f"{sum(heard.is_false for heard in found)} of {len(found)} right runs with an alarm")
    headings = ("scenario", "seed", "steps", "compared", "alarms", "failed publishes", "largest, nats", "mixed, nats")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for heard in found:
        counts = (heard.seed, heard.num_steps, heard.num_compared, heard.num_alarms, heard.num_failed_publishes)
        table.add_row(heard.scenario, *map(str, counts), f"{heard.largest_nats:.2g}", f"{heard.largest_mixed_nats:.2g}")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Run, print, write JSON; 1 where there was an alarm."""
    parser = argparse.ArgumentParser(prog="penstock bench false_alarms", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; all if none is named")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--output", type=Path, default=None, help="write what was heard here as JSON")
    options = parser.parse_args(argv)
    console = Console()
    found = measure(
        options.scenarios or tuple(SCENARIOS), seeds=options.seeds, num_steps=options.steps, console=console
    )
    _print(found, console)
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return int(any(heard.is_false for heard in found))


if __name__ == "__main__":
    raise SystemExit(main())
