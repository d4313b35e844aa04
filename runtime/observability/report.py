"""``report.html``: what a run did, on one page that needs nothing else, no network either.

Invariants:

* It reads the run's folder only: ``scenario.yaml``, ``summary.json``, ``metrics.jsonl``, ``activity.jsonl``,
  ``samples.sqlite`` with what the ledger says of these samples and, where there was a GPU, ``gpu.jsonl``.
* A run that failed, or was killed before it wrote a summary, gets a report too: each part shows what there is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jinja2
import msgspec
from markupsafe import Markup

from penstock.messages.samples import TerminalState
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.lanes import lanes_of
from penstock.runtime.observability.nvml import read_gpus
from penstock.runtime.observability.plots import (
    evaluation_charts,
    evaluation_table,
    figure_rows,
    gpu_charts,
    learning_charts,
    speed_charts,
    staleness_charts,
)
from penstock.runtime.observability.samples import reported_samples
from penstock.runtime.observability.shares import rounded_shares
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.texts import bytes_text, count_text, duration_text, number_text, tiles
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from penstock.messages.training import Balance
    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import StepRow

REPORT_FILE: Final = "report.html"
SCENARIO_FILE: Final = "scenario.yaml"
_TEMPLATE: Final = "report.html.j2"


class BalanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger's balance."""

    state: str
    cause: str
    num_samples: int
    num_tokens: int
    share: float
    """Of the samples issued, in percent."""


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` of a run into its folder; returns its path.

    Raises:
        RunFolderError: a file of the run is damaged; the message names it.
        OSError: the report cannot be written.
    """
    path = run_folder / REPORT_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(render_report(run_folder), encoding="utf-8")
    os.replace(partial, path)
    return path


def render_report(run_folder: Path) -> str:
    """The report of a run as HTML.

    Raises:
        RunFolderError: a file of the run is damaged; the message names it.
    """
    summary = read_summary(run_folder)
    steps = read_steps(run_folder)
    evaluations = read_evaluations(run_folder)
    balance = _balance(summary, steps)
    scenario = run_folder / SCENARIO_FILE
    return (
        _environment()
        .get_template(_TEMPLATE)
        .render(
            name=summary.scenario if summary else run_folder.name,
            folder=run_folder.name,
            summary=summary,
            tiles=tiles(summary, steps),
            learning=learning_charts(steps),
            evaluation=evaluation_charts(evaluations),
            evaluated=evaluation_table(evaluations),
            staleness=staleness_charts(steps, summary.staleness_bound if summary else None),
            speed=speed_charts(steps),
            gpus=gpu_charts(read_gpus(run_folder)),
            figures=figure_rows(steps),
            lanes=lanes_of(read_activity(run_folder)),
            balance=balance,
            balance_rows=[] if balance is None else balance_rows(balance),
            scenario=scenario.read_text(encoding="utf-8") if scenario.exists() else None,
            num_steps=len(steps),
            samples=reported_samples(run_folder),
        )
    )


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
            num_tokens=count.num_tokens,
            share=share,
        )
        for count, share in zip(ended, shares, strict=False)
    ]
    if balance.in_system:
        in_system = BalanceRow(
            state="in the system", cause="", num_samples=balance.in_system, num_tokens=0, share=shares[-1]
        )
        rows.append(in_system)
    return rows


def _balance(summary: RunSummary | None, steps: list[StepRow]) -> Balance | None:
    if summary is not None:
        return summary.balance
    return steps[-1].balance if steps else None


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": count_text,
        "number": number_text,
        "duration": duration_text,
        "bytes": bytes_text,
        "svg": Markup,  # our own drawings; everything else is escaped
    }
    return environment
