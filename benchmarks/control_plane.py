"""Groups a second through all seven actors on the real host, and what one hop costs.

How it is measured:

* ``penstock run`` with engines and learner that are modelled and take no time: what is left are the processes, their
  sockets (CURVE on and off), the ledger on disk and the actors' own logic. Groups are 8 samples of 512 tokens.
* The rate is that of the steps after the first fifth, from the run's own ``metrics.jsonl``. CPU time is each process's
  own, so other load on the machine does not count.
* With and without encryption in turn, several repetitions, medians. ``penstock bench hop`` compares one hop with Ray.
* What the disk costs: the same run with a ledger in memory, in turn with that on disk (``--ledger both``). The ratio of
  rates needs a quiet machine; the Buffer's CPU time, in which writing and syncing are, holds on a busy one too.
* What tracing costs: runs with and without it, in turn; the median over pairs, of the rate and of the CPU time of all
  processes from when they are built, as their logs have it. ``--ledger traces`` runs nothing else.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.backends.ledger.sqlite import MEMORY_VARIABLE
from penstock.benchmarks._progress import repeated
from penstock.benchmarks._runs import FinishedRun, run
from penstock.messages.names import BUFFER
from penstock.runtime.run.plan import log_name

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUIRED_GROUPS_PER_S: Final = 600.0
MAX_TRACING_COST: Final = 0.03
"""Share of the CPU time of all processes."""
GROUPS_PER_BATCH: Final = 32
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


class TracingCost(msgspec.Struct, frozen=True, kw_only=True):
    """Of pairs of runs, one after the other: shares that go with tracing."""

    rate_losses: list[float]
    """1 − groups/s with tracing ÷ groups/s without."""
    cpu_costs: list[float]
    """CPU time with tracing ÷ CPU time without − 1."""

    @property
    def cpu_cost(self) -> float:
        return statistics.median(self.cpu_costs)


class ControlPlaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions, by variant."""

    ledger_loss: float | None = None
    """1 − rate with the ledger on disk ÷ rate with it in memory: the median over pairs of runs, one after the other."""
    all_ledger_losses: list[float] = []
    tracing: TracingCost | None = None

    groups_per_s: dict[str, float]
    all_groups_per_s: dict[str, list[float]]
    cpu_ms_per_group: dict[str, dict[str, float]]
    required_groups_per_s: float = REQUIRED_GROUPS_PER_S


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
    ``traces`` compares with and without tracing alone."""
    first, *others = VARIANTS
    return {
        "file": VARIANTS,
        "memory": (first, IN_MEMORY),
        "both": (first, IN_MEMORY, *others),
        "traces": VARIANTS[:2],
    }[ledger]


def measure(*, repetitions: int, num_steps: int, variants: Sequence[Variant] = VARIANTS) -> ControlPlaneReport:
    """Run every variant in turn."""
    rates: dict[str, list[Rate]] = {variant.name: [] for variant in variants}
    with tempfile.TemporaryDirectory() as parent:
        by_name = {variant.name: variant for variant in variants}
        for repetition, name in repeated(repetitions, by_name):
            variant = by_name[name]
            folder = Path(parent) / f"{repetition}-{variants.index(variant)}"
            overrides = (f"run.num_steps={num_steps}", *variant.overrides)
            environment = {MEMORY_VARIABLE: ":memory:"} if variant.in_memory else {}
            rates[name].append(rate_of(run(SCENARIO, overrides, folder, environment=environment)))
    pairs = zip(rates[VARIANTS[0].name], rates.get(IN_MEMORY.name, []), strict=False)
    losses = [1 - on_disk.groups_per_s / in_memory.groups_per_s for on_disk, in_memory in pairs]
    return ControlPlaneReport(
        ledger_loss=statistics.median(losses) if losses else None,
        all_ledger_losses=losses,
        tracing=_tracing_cost(rates[VARIANTS[0].name], rates.get(VARIANTS[1].name, [])),
        groups_per_s={name: statistics.median(rate.groups_per_s for rate in found) for name, found in rates.items()},
        all_groups_per_s={name: [rate.groups_per_s for rate in found] for name, found in rates.items()},
        cpu_ms_per_group={name: _medians(found) for name, found in rates.items()},
    )


def _tracing_cost(traced: list[Rate], untraced: list[Rate]) -> TracingCost | None:
    pairs = list(zip(traced, untraced, strict=False))
    if not pairs:
        return None
    return TracingCost(
        rate_losses=[1 - on.groups_per_s / off.groups_per_s for on, off in pairs],
        cpu_costs=[on.cpu_ms_after_start / off.cpu_ms_after_start - 1 for on, off in pairs],
    )


def _percents(shares: Sequence[float]) -> str:
    return f"{100 * statistics.median(shares):.1f} % (pairs: {', '.join(f'{100 * share:.1f}' for share in shares)})"


def _medians(rates: list[Rate]) -> dict[str, float]:
    actors = rates[0].cpu_ms_per_group
    return {actor: statistics.median(rate.cpu_ms_per_group[actor] for rate in rates) for actor in actors}


def _print(report: ControlPlaneReport, console: Console) -> None:
    table = Table(title="8 × 512 tokens a group, ledger on disk")
    for heading in ("", "groups/s", "CPU-ms a group"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, rate in report.groups_per_s.items():
        table.add_row(name, f"{rate:,.0f}", f"{sum(report.cpu_ms_per_group[name].values()):.2f}")
    console.print(table)
    if report.ledger_loss is not None:
        losses = ", ".join(f"{100 * loss:.1f}" for loss in report.all_ledger_losses)
        on_disk, in_memory = (report.cpu_ms_per_group[variant.name] for variant in (VARIANTS[0], IN_MEMORY))
        cost_ms = on_disk[BUFFER] - in_memory[BUFFER]
        console.print(
            f"the ledger on disk costs {100 * report.ledger_loss:.1f} % of groups/s (pairs: {losses}), and the Buffer "
            f"{1000 * cost_ms:.0f} µs of CPU a group: {100 * cost_ms / sum(in_memory.values()):.1f} % of what all use"
        )
    if (tracing := report.tracing) is not None:
        console.print(
            f"tracing costs {_percents(tracing.rate_losses)} of groups/s and {_percents(tracing.cpu_costs)} of CPU "
            f"time, of which {100 * MAX_TRACING_COST:.0f} % are allowed"
        )
    first = VARIANTS[0].name
    profile = Table(title="where the time goes")
    profile.add_column("actor", no_wrap=True)
    profile.add_column("CPU-ms a group", justify="right")
    for actor, cost in sorted(report.cpu_ms_per_group[first].items(), key=lambda item: -item[1]):
        profile.add_row(actor, f"{cost:.3f}")
    console.print(profile)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON; 1 when the rate with CURVE is below what is required, or tracing costs too much."""
    parser = argparse.ArgumentParser(prog="penstock bench control_plane", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--ledger",
        choices=("both", "file", "memory", "traces"),
        default="both",
        help="compare the ledger on disk with one in memory, leave that out, or measure nothing else; "
        "traces: only what tracing costs",
    )
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    variants = variants_of(options.ledger)
    report = measure(repetitions=options.repetitions, num_steps=options.steps, variants=variants)
    console = Console()
    _print(report, console)
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    reached = report.groups_per_s[VARIANTS[0].name]
    console.print(f"with CURVE and traces: {reached:,.0f} groups/s, {REQUIRED_GROUPS_PER_S:,.0f} are wanted")
    is_cheap = report.tracing is None or report.tracing.cpu_cost <= MAX_TRACING_COST
    return 0 if reached >= REQUIRED_GROUPS_PER_S and is_cheap else 1


if __name__ == "__main__":
    raise SystemExit(main())
