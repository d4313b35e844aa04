"""Groups a second through all seven actors on the real host, and what one hop costs.

How it is measured:

* ``penstock run`` with engines and learner that are modelled and take no time: what is left are the processes, their
  sockets (CURVE on and off), the ledger on disk and the actors' own logic. Groups are 8 samples of 512 tokens.
* The rate is that of the steps after the first fifth, from the run's own ``metrics.jsonl``. CPU time is each process's
  own, so other load on the machine does not count.
* With and without encryption in turn. ``penstock bench hop`` compares one hop with Ray.
* What the disk costs: the same run with a ledger in memory, in turn with that on disk (``--ledger both``). The ratio of
  rates needs a quiet machine; the Buffer's CPU time, in which writing and syncing are, holds on a busy one too.
* What tracing costs: runs with and without it, in turn; the median over pairs, of the rate and of the CPU time of all
  processes from when they are built, as their logs have it. ``--ledger traces`` runs nothing else.
* What recording for ``penstock replay`` costs: the same, with ``--ledger recording``.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.sqlite import MEMORY_VARIABLE
from penstock.benchmarks._harness import (
    Benchmark,
    Measured,
    Turns,
    claim,
    figures,
    in_folders,
    pairs,
    plain_figure,
)
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import BUFFER
from penstock.runtime.run.plan import log_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.benchmarks._results import Figure

REQUIRED_GROUPS_PER_S: Final = 600.0
MAX_TRACING_COST: Final = 0.03
"""Share of the CPU time of all processes."""
GROUPS_PER_BATCH: Final = 32
QUICK: Final = ("--ledger", "traces", "--repetitions", "1", "--steps", "60")
QUICK_S: Final = 40
SCENARIO: Final = """\
run: {name: control_plane, num_steps: 300}
data: {path: "lines:100000"}
model: {max_context: 4096}
sampling: {samples_per_group: 8, max_response_tokens: 512}
filter: {drop_zero_spread: false}
staleness: {policy: fully_async, max_staleness: 8, target_outstanding: 288}
engines:
  backend: simulated
  count: 2
  slots: 1024
  progress_tokens: 100000
  simulated:
    response_tokens_median: 100000
    response_tokens_sigma: 0
    prefill_s: 0
    token_s: 1.0e-7
    token_load_s: 0
    apply_weights_s: 0
    fetch_weights_s: 0
learner:
  backend: simulated
  groups_per_batch: 32
  simulated: {step_s: 0, publish_s: 0}
observability: {report: false}
"""


class Variant(msgspec.Struct, frozen=True):
    """One arm of the comparison."""

    name: str
    overrides: tuple[str, ...]
    in_memory: bool = False
    """The ledger is lost with the Buffer's process."""


IN_MEMORY: Final = Variant("CURVE, traces on, ledger in memory", (), in_memory=True)
RECORDED: Final = Variant("CURVE, traces on, recorded", ("observability.record=true",))
VARIANTS: Final = (
    Variant("CURVE, traces on", ()),
    Variant("CURVE, traces off", ("observability.tracing=false",)),
    Variant("plain, traces off", ("observability.tracing=false", "runtime.encrypt=false")),
)


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    groups_per_s: float
    cpu_ms_per_group: dict[str, float]
    """By actor."""
    cpu_ms_after_start: float
    """Of all actors, for a group: without what their processes used until they were built."""


def rate_of(finished: FinishedRun) -> Rate:
    """Rate after the first fifth of the steps, and CPU time over the whole run."""
    steps = finished.steps
    first, last = steps[len(steps) // 5], steps[-1]
    num_groups = (last.version - first.version) * GROUPS_PER_BATCH
    all_groups = last.version * GROUPS_PER_BATCH
    cpu = {cost.name: 1000 * cost.cpu_s / all_groups for cost in finished.summary.costs}
    start_ms = 1000 * sum(_start_cpu_s(finished.folder, cost.name) for cost in finished.summary.costs) / all_groups
    return Rate(
        groups_per_s=num_groups / (last.at_s - first.at_s),
        cpu_ms_per_group=cpu,
        cpu_ms_after_start=sum(cpu.values()) - start_ms,
    )


def _start_cpu_s(folder: Path, actor: str) -> float:
    """What the process of an actor's only incarnation had used when it was built."""
    log = (folder / log_name(actor, 1)).read_text()
    found = re.search(r"is built after .*; the process has used ([\d.]+) s of CPU", log)
    if found is None:
        raise RuntimeError(f"{folder / log_name(actor, 1)} does not say what the start has cost")
    return float(found[1])


def variants_of(ledger: str) -> tuple[Variant, ...]:
    """What is run in turn: ``file`` leaves the ledger in memory out, ``memory`` runs nothing else beside the first, and
    ``traces`` and ``recording`` compare with and without one of these alone."""
    first, *others = VARIANTS
    return {
        "file": VARIANTS,
        "memory": (first, IN_MEMORY),
        "both": (first, IN_MEMORY, *others),
        "traces": VARIANTS[:2],
        "recording": (first, RECORDED),
    }[ledger]


def turns_of(variants: Sequence[Variant], *, repetitions: int, num_steps: int, host: str) -> Turns[Rate]:
    """Runs of every variant in turn."""

    def rate(variant: Variant, folder: Path) -> Rate:
        overrides = (f"run.num_steps={num_steps}", f"runtime.host={host}", *variant.overrides)
        environment = {MEMORY_VARIABLE: ":memory:"} if variant.in_memory else {}
        return rate_of(run(SCENARIO, overrides, folder, environment=environment))

    return in_folders({variant.name: partial(rate, variant) for variant in variants}, repetitions)


def measure(given: argparse.Namespace) -> Measured:
    """Every variant in turn, and what the shares of the pairs come to."""
    variants = variants_of(given.ledger)
    turns = turns_of(variants, repetitions=given.repetitions, num_steps=given.steps, host=given.host)
    rates = figures(turns, "groups/s", lambda rate: rate.groups_per_s)
    cpu = figures(turns, "CPU-ms a group", lambda rate: sum(rate.cpu_ms_per_group.values()))
    started = figures(turns, "CPU-ms a group after the start", lambda rate: rate.cpu_ms_after_start)
    claims = [claim(f"groups/s, {variants[0].name}", rates[0].values, at_least=REQUIRED_GROUPS_PER_S)]
    profile = [figure for actor in turns[variants[0].name][0].value.cpu_ms_per_group for figure in _of(actor, turns)]
    by_name = {variant.name: at for at, variant in enumerate(variants)}
    if (at := by_name.get(IN_MEMORY.name)) is not None:
        losses = [1 - ratio for ratio in pairs(rates[0], rates[at])]
        profile.append(plain_figure("what the ledger on disk costs", "share of groups/s", losses))
    if (at := by_name.get(VARIANTS[1].name)) is not None:
        losses = [1 - ratio for ratio in pairs(rates[0], rates[at])]
        profile.append(plain_figure("what tracing costs", "share of groups/s", losses))
        costs = [ratio - 1 for ratio in pairs(started[0], started[at])]
        claims.append(claim("share of the CPU time that tracing costs", costs, at_most=MAX_TRACING_COST))
    if (at := by_name.get(RECORDED.name)) is not None:
        costs = [ratio - 1 for ratio in pairs(started[at], started[0])]
        profile.append(plain_figure("what recording costs", "share of the CPU time", costs))
    left_out = (variant.name for variant in (*VARIANTS, IN_MEMORY, RECORDED) if variant not in variants)
    return Measured(rates + cpu + profile, claims, tuple(left_out))


def _of(actor: str, turns: Turns[Rate]) -> list[Figure]:
    """Where the time goes, by arm: of the Buffer in all, of the others in the first."""
    chosen = turns if actor == BUFFER else dict(itertools.islice(turns.items(), 1))
    return figures(chosen, "CPU-ms a group", lambda rate: rate.cpu_ms_per_group[actor], f"{actor}: {{}}")


def main(argv: list[str] | None = None) -> int:
    """Measure and judge; 1 when the rate with CURVE is below what is required, or tracing costs too much."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--steps", type=int, default=300)
    benchmark.option(
        "--host",
        choices=("ray", "local"),
        default="ray",
        help="what starts the actors; processes of Ray use some CPU of their own each second",
    )
    benchmark.option(
        "--ledger",
        choices=("both", "file", "memory", "traces", "recording"),
        default="both",
        help="compare the ledger on disk with one in memory, leave that out, or measure nothing else; "
        "traces, recording: only what one of these costs",
    )
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
