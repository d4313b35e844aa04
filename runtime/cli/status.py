"""``penstock status``: what a run's folder says about the run."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding

from penstock.backends.processes.process_facts import is_stopped
from penstock.messages.texts import counted
from penstock.messages.waits import is_waiting
from penstock.runtime.launch.launch import begin_again, resume_command
from penstock.runtime.launch.runs import SCENARIO_NAME, driven_instead, is_alive, other_host, read_record
from penstock.runtime.launch.status import state_of
from penstock.runtime.observability.accounting import read_accounts
from penstock.runtime.observability.accounting_view import accounts_tables
from penstock.runtime.observability.actors_file import read_actors
from penstock.runtime.observability.figures import CURSORS, REWARD
from penstock.runtime.observability.operations import pause_in_force, policy_in_force, read_operations
from penstock.runtime.observability.samples import reason_counts
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.summary_view import failures_table
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.launch.runs import RunRecord


def show_status(folder: Path, console: Console) -> int:
    """Print it; 0 for a run that is alive or completed, 1 for one that failed, was stopped or vanished.

    Raises:
        UserFault: the folder holds no run.
    """
    record = read_record(folder)
    alive = is_alive(folder, record)
    console.print(f"[bold]{escape(record.name)}[/]  {escape(str(folder))}", soft_wrap=True)
    console.print(f"  {escape(terminal_lines(_state(folder, record, alive=alive)))}", soft_wrap=True)
    if record.earlier:
        console.print(f"  {_earlier(record)}")
    lines = (*_progress(folder, is_running=record.state == "running"), *_operated(folder, record, alive=alive))
    for line in (*lines, *(_waiting(folder) if alive else ())):
        console.print(f"  {escape(terminal_lines(line))}", soft_wrap=True)
    console.print(Padding(accounts_tables(read_accounts(folder)), (0, 0, 0, 2)))
    if counts := reason_counts(folder):
        console.print(Padding(failures_table(counts, sum(count.num_samples for count in counts)), (1, 0, 0, 2)))
        console.print(
            f"  to look at them: {escape(shlex.join(('penstock', 'samples', str(folder))))} --failed", soft_wrap=True
        )
    if not alive and record.state != "completed" and not other_host(record) and not driven_instead(folder, record):
        text = f"to go on: {resume_command(folder.absolute())}"
        if record.state == "diverged":
            text = begin_again(folder.absolute(), load_scenario(folder / SCENARIO_NAME))
        console.print(f"  {escape(text)}", soft_wrap=True)
    return 0 if state_of(folder, record) in ("running", "completed") else 1


def _state(folder: Path, record: RunRecord, *, alive: bool) -> str:
    if record.ended_at is not None:
        return f"{record.state} after {duration(record.ended_at - record.started_at)}, exit code {record.exit_code}"
    since = duration(time.time() - record.started_at)
    if alive and is_stopped(record.pid):
        return (
            f"running for {since}, but process {record.pid} is stopped; kill -CONT {record.pid} lets it go on, and "
            "penstock resume takes its place"
        )
    if alive:
        return f"running for {since}, process {record.pid}"
    if host := other_host(record):
        return f"running for {since} on {host}, by what stands here; its process cannot be seen from this machine"
    if other := driven_instead(folder, record):
        return f"a copy of a run that goes on: process {record.pid} drives {other}"
    return f"vanished: process {record.pid} ended without a word (killed, or the machine went down); began {since} ago"


def _earlier(record: RunRecord) -> str:
    ends = Counter("vanished" if drive.ended_at is None else drive.state for drive in record.earlier)
    return f"drive {len(record.earlier) + 1} of this run; before: {', '.join(f'{n} {end}' for end, n in ends.items())}"


def _progress(folder: Path, *, is_running: bool) -> Iterator[str]:
    steps, summary = read_steps(folder), None if is_running else read_summary(folder)
    if not steps:
        yield "no step yet"
        if summary is not None:
            yield summary.story
        return
    last = steps[-1]
    ages = sum(age * count for age, count in enumerate(last.staleness_counts)) / max(1, sum(last.staleness_counts))
    reward = last.metrics.get(REWARD)
    figures = [f"step {last.version} of {last.num_steps}", f"mean staleness {ages:.2f}"]
    if reward is not None:
        figures.insert(1, f"reward {reward:.3f}")
    yield ", ".join(figures)
    if cursors := [
        f"{name.split('/')[1]} {value:.0f}"
        for name, value in last.metrics.items()
        if _is_cursor(name) and value is not None
    ]:
        yield f"prompts by source: {', '.join(cursors)}"
    balance = last.balance if summary is None else summary.balance
    verdict = "balanced" if balance.is_balanced else "NOT balanced"
    yield f"{counted(balance.issued, 'sample')} issued, {balance.in_system} in the system: {verdict}"
    if summary is not None:
        yield summary.story
        if summary.checkpoint:
            yield f"checkpoint {summary.checkpoint}"


def _operated(folder: Path, record: RunRecord, *, alive: bool) -> Iterator[str]:
    """What an operator has changed and holds now: a policy, and a pause, so that nobody forgets it."""
    operations = read_operations(folder)
    if switch := policy_in_force(operations):
        yield (
            f"policy since step {switch.version}: {switch.policy}, max_staleness {switch.max_staleness}, update_mode "
            f"{switch.update_mode}, on_stale {switch.on_stale}"
        )
    if (pause := pause_in_force(operations)) and record.state != "completed":
        since = duration(time.time() - pause.recorded_at)
        waits = "the run trains what is out, and then waits; " if alive else "resumed, it waits; "
        command = shlex.join(("penstock", "pause", str(folder), "--off"))
        yield f"new grants are paused for {since}, since step {pause.version}: {waits}to let them go on: {command}"


def _waiting(folder: Path) -> Iterator[str]:
    """The engines of a run that goes on whose machines are still to come."""
    now = read_actors(folder)
    for actor in () if now is None else now.actors:
        if is_waiting(actor.state):
            yield f"{actor.name} {actor.state}"


def _is_cursor(name: str) -> bool:
    return name.startswith(CURSORS) and name.endswith("/prompts")


def duration(seconds: float) -> str:
    """``3725`` as ``1 h 2 min 5 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"
