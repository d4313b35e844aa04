"""``report.html``: what a run did, on one page that needs nothing else, no network either.

Invariants:

* It reads the run's folder only: ``starts.jsonl``, ``scenario.yaml``, ``summary.json``, ``metrics.jsonl``,
  ``activity.jsonl``, ``traces/``, ``samples.sqlite`` with what the ledger says of these samples and of what an operator
  changed and, where there was a GPU, ``gpu.jsonl``.
* A run that failed, or was killed before it wrote a summary, gets a report too: each part shows what there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.profiling import profile_files
from penstock.messages.errors import UserFault
from penstock.messages.samples import TerminalState
from penstock.runtime.observability.accounting import read_accounts
from penstock.runtime.observability.accounting_view import token_rows
from penstock.runtime.observability.chart_plans import AGREEMENT, OBJECTIVE
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.explain import explain
from penstock.runtime.observability.facts import LANES_FILE, REPORT_FILE, SCENARIO_FILE, read_starts
from penstock.runtime.observability.lanes import lanes_of
from penstock.runtime.observability.lanes_picture import lanes_picture
from penstock.runtime.observability.nvml import read_gpus
from penstock.runtime.observability.operations import marked, read_operations
from penstock.runtime.observability.page import render_page, write_whole
from penstock.runtime.observability.plots import (
    evaluation_charts,
    evaluation_table,
    fate_charts,
    figure_rows,
    gpu_charts,
    learning_charts,
    other_charts,
    planned_charts,
    speed_charts,
    staleness_charts,
)
from penstock.runtime.observability.pushed import pushed_facts
from penstock.runtime.observability.removed import all_removed
from penstock.runtime.observability.samples import reason_counts, reported_samples
from penstock.runtime.observability.shares import rounded_shares
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.texts import bytes_text, duration_text, tiles
from penstock.runtime.observability.trackers import read_activity, read_steps
from penstock.runtime.pictures import png_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.messages.training import Balance
    from penstock.runtime.observability.explain import Explanation
    from penstock.runtime.observability.facts import Start
    from penstock.runtime.observability.operations import AnyOperation
    from penstock.runtime.observability.summary import MachineFacts, RunSummary
    from penstock.runtime.observability.trackers import ActivityRow, StepRow

_TEMPLATE: Final = "report.html.j2"


class BalanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger's balance."""

    state: str
    cause: str
    num_samples: int
    num_tokens: int
    share: float
    """Share of the samples issued, in percent."""


def write_report(run_folder: Path, *, is_running: bool = False) -> Path:
    """Write ``report.html`` of a run into its folder, and beside it ``lanes.png``, where anybody reported its time;
    returns the page's path.

    Args:
        run_folder: of the run.
        is_running: it has not ended yet.

    Raises:
        UserFault: a file of the run is damaged; the message names it.
        OSError: one of them cannot be written.
    """
    values = _values(run_folder, is_running=is_running)
    page = write_whole(run_folder / REPORT_FILE, render_page(_TEMPLATE, **values))
    if values["lanes"] is not None:
        write_whole(run_folder / LANES_FILE, png_of(lanes_picture(values["lanes"], values["name"])))
    return page


def render_report(run_folder: Path, *, is_running: bool = False) -> str:
    """The report of a run as HTML; arguments as for :func:`write_report`.

    Raises:
        UserFault: a file of the run is damaged; the message names it.
    """
    return render_page(_TEMPLATE, **_values(run_folder, is_running=is_running))


def _values(run_folder: Path, *, is_running: bool) -> dict[str, Any]:
    """What the template names."""
    summary = None if is_running else read_summary(run_folder)
    steps = read_steps(run_folder)
    starts = read_starts(run_folder)
    evaluations = read_evaluations(run_folder)
    balance = _balance(summary, steps)
    lanes = read_activity(run_folder)
    accounts = read_accounts(run_folder, lanes=lanes)
    scenario = run_folder / SCENARIO_FILE
    operations = read_operations(run_folder)
    bound = summary.staleness_bound if summary else starts[-1].facts.staleness_bound if starts else None
    return {
        "name": summary.scenario if summary else starts[-1].facts.scenario if starts else run_folder.name,
        "is_running": is_running,
        "summary": summary,
        "facts": [*fact_rows(run_folder.name, starts, summary, operations), *pushed_facts(run_folder)],
        "removed": all_removed(run_folder),
        "tiles": tiles(summary, steps),
        "learning": marked(learning_charts(steps), operations),
        "evaluation": evaluation_charts(evaluations),
        "evaluated": evaluation_table(evaluations),
        "objective": marked(planned_charts(steps, OBJECTIVE), operations),
        "agreement": marked(planned_charts(steps, AGREEMENT), operations),
        "staleness": marked(staleness_charts(steps, bound), operations),
        "speed": marked(speed_charts(steps), operations),
        "gpus": gpu_charts(read_gpus(run_folder)),
        "fates": marked(fate_charts(steps), operations),
        "failures": summary.failures if summary else reason_counts(run_folder),
        "figures": figure_rows(steps),
        "others": marked(other_charts(steps), operations),
        "explained": _explained(run_folder, lanes),
        "lanes": lanes_of(lanes),
        "accounts": accounts,
        "token_rows": list(token_rows(accounts)),
        "balance": balance,
        "balance_rows": [] if balance is None else balance_rows(balance),
        "scenario": scenario.read_text(encoding="utf-8") if scenario.exists() else None,
        "num_steps": len(steps),
        "samples": reported_samples(run_folder),
        "profiles": profile_files(run_folder),
    }


def fact_rows(
    folder: str,
    starts: Sequence[Start],
    summary: RunSummary | None,
    operations: Sequence[AnyOperation] = (),
) -> list[tuple[str, str]]:
    """What a run was, by label: of its last start and, where it has ended, of its end. What is unknown is left out."""
    rows = {"folder": folder}
    if starts:
        facts = starts[-1].facts
        rows |= {
            "command": facts.command,
            "commit": f"{facts.git_commit}{' and changes that are in no commit' * facts.git_is_dirty}",
            "software": ", ".join(f"{each.name} {each.version}" for each in facts.packages)
            + f", Python {facts.machine.python}",
            "model": facts.model,
            "backends": facts.backends,
            "machine": machine_text(facts.machine),
            "policy": f"{facts.policy}, staleness at most {facts.staleness_bound}",
            "changed since": "\n".join(f"{each.label} (after step {each.version:,})" for each in operations),
            "seed": str(facts.seed),
            "started": starts[0].at,
            "before": "\n".join(
                f"{start.at} {start.facts.command} {start.facts.git_commit[:12]}" for start in starts[:-1]
            ),
        }
    if summary is not None:
        outcome = "completed" if summary.completed else "not completed"
        reached = f" at version {summary.version:,} of {summary.num_steps:,}" if summary.num_steps else ""
        rows |= {
            "started": summary.started_at,
            "outcome": f"{outcome}{reached}",
            "duration": f"{duration_text(summary.wall_s)}, of it {duration_text(summary.training_s)} training",
            "checkpoint": summary.checkpoint or "none",
            "CPU time": ", ".join(f"{cost.name} {duration_text(cost.cpu_s)}" for cost in summary.costs),
        }
    return [(label, text) for label, text in rows.items() if text]


def machine_text(machine: MachineFacts) -> str:
    """A machine in a line."""
    gpus = ", ".join(machine.gpus) or "no GPU"
    return f"{machine.system}, {machine.num_cpus} CPU cores, {bytes_text(machine.memory_bytes)}, {gpus}"


def balance_rows(balance: Balance) -> list[BalanceRow]:
    """The balance by terminal state and cause, states in the order of their enumeration, then by samples; at the end
    what is still in the system. The shares add up to 100."""
    order = {state.value: place for place, state in enumerate(TerminalState)}
    ended = sorted(
        (count for count in balance.ended if count.num_samples),
        key=lambda count: (order.get(count.state, len(order)), -count.num_samples, count.cause),
    )
    counts = [count.num_samples for count in ended]
    if balance.in_system:
        counts.append(balance.in_system)
    shares = rounded_shares(counts)
    rows = [
        BalanceRow(
            state=count.state,
            cause=count.cause,
            num_samples=count.num_samples,
            num_tokens=count.num_made_tokens,
            share=share,
        )
        for count, share in zip(ended, shares, strict=False)
    ]
    if balance.in_system:
        in_system = BalanceRow(
            state="in the system",
            cause="",
            num_samples=balance.in_system,
            num_tokens=balance.in_system_tokens,
            share=shares[-1],
        )
        rows.append(in_system)
    return rows


def _explained(run_folder: Path, lanes: Mapping[str, Sequence[ActivityRow]]) -> Explanation | str | None:
    """What binds the run; in its place why that cannot be said, and None of a folder without a scenario."""
    if not (run_folder / SCENARIO_FILE).exists():
        return None
    try:
        return explain(run_folder, lanes=lanes)
    except UserFault as error:
        return str(error).replace(f"{run_folder}/", "")  # where it lies is nobody's business who is sent the page


def _balance(summary: RunSummary | None, steps: list[StepRow]) -> Balance | None:
    if summary is not None:
        return summary.balance
    return steps[-1].balance if steps else None
