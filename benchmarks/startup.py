"""How long it takes until a run generates its first token, and until one of two steps has ended; both hosts.

How it is measured:

* Every arm is the command line, as a user types it, in a process of its own: ``--help``, a dry run, and a run of two
  steps of the smallest model with a warm start of 250, on the local host and on Ray. The whole of it counts, from the
  start of the interpreter to its end.
* *Anew* nothing is taken from the user's cache, *again* the made model and its warm start are: a folder of the
  benchmark's own is filled by a run that is not counted.
* CPU seconds are those of all processes of the run that somebody has waited for; they hold on a busy machine too. What
  is claimed of wall time holds for a quiet one with two cores.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.result_cache import CACHE_VARIABLE, OFF
from penstock.benchmarks._harness import Benchmark, Measured, claim, cpu_seconds, figures, in_folders
from penstock.benchmarks._progress import say
from penstock.benchmarks._runs import run
from penstock.messages.names import is_engine
from penstock.messages.training import Activity

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

QUICK: Final = ("--repetitions", "1", "--hosts", "local")
QUICK_S: Final = 45
HELP_S: Final = 0.4
MOST_S: Final = {"local": 7.0, "ray": 12.0}
SCENARIO: Final = """
run: {name: startup, num_steps: 2}
model: {make: xs}
data: {path: 'lines:4000'}
sampling: {samples_per_group: 8, max_response_tokens: 256}
reward: {function: lines}
staleness: {policy: fully_async, max_staleness: 2}
learner:
  groups_per_batch: 16
  learning_rate: 1e-3
  warm_start: {path: 'lines:4000', num_steps: 250, learning_rate: 4e-3}
"""


class Started(NamedTuple):
    """One command."""

    wall_s: float
    """From its start to its end."""
    cpu_s: float
    first_token_s: float = 0.0
    """From the record of the run to the first moment that an engine worked."""


def _command(arguments: tuple[str, ...], folder: Path) -> Started:
    folder.mkdir()
    (folder / "scenario.yaml").write_text(SCENARIO)
    command = [sys.executable, "-m", "penstock.runtime.cli", *arguments]
    began_s, cpu_s = time.perf_counter(), cpu_seconds()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return Started(time.perf_counter() - began_s, cpu_seconds() - cpu_s)


def _run(host: str, cache: str, folder: Path) -> Started:
    began_s, cpu_s = time.perf_counter(), cpu_seconds()
    done = run(SCENARIO, (f"runtime.host={host}",), folder, environment={CACHE_VARIABLE: cache})
    wall_s, cpu_s = time.perf_counter() - began_s, cpu_seconds() - cpu_s
    worked = [row.start_s for row in done.activity if is_engine(row.actor) and row.activity is Activity.WORKING]
    return Started(wall_s, cpu_s, min(worked))


def measure(given: argparse.Namespace) -> Measured:
    """Everything in turn."""
    hosts: list[str] = given.hosts.split(",")
    with TemporaryDirectory() as cache:
        say("a run that fills the cache")
        _run("local", cache, Path(cache) / "run")
        arms: dict[str, Callable[[Path], Started]] = {
            "--help": partial(_command, ("--help",)),
            "run --dry-run": partial(_command, ("run", "scenario.yaml", "--dry-run")),
        }
        for host in hosts:
            arms |= {f"{host}, anew": partial(_run, host, OFF), f"{host}, again": partial(_run, host, cache)}
        turns = in_folders(arms, given.repetitions)
    walls = figures(turns, "s", lambda each: each.wall_s)
    of_runs = {name: made for name, made in turns.items() if "," in name}
    found = [
        *walls,
        *figures(turns, "CPU s", lambda each: each.cpu_s, "{}: CPU"),
        *figures(of_runs, "s", lambda each: each.first_token_s, "{}: to the first token"),
    ]
    values = {figure.name: figure.values for figure in walls}
    claims = [claim("seconds of penstock --help", values["--help"], at_most=HELP_S)]
    claims += [
        claim(f"seconds of a run of two steps, {host}, again", values[f"{host}, again"], at_most=MOST_S[host])
        for host in hosts
    ]
    return Measured(found, claims, ("a start with GPUs", "a cluster"))


def main(argv: list[str] | None = None) -> int:
    """Measure and judge; 1 when a start takes longer than it may."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--hosts", default="local,ray", help="of the runs, with commas (default: local,ray)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
