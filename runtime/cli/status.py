"""``penstock status``: what a run's folder says about the run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.runtime.cli.runs import is_alive, read_record

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.cli.runs import RunRecord


def show_status(folder: Path, console: Console) -> int:
    """Print it; 0 for a run that is alive or completed, 1 for one that failed, was stopped or vanished.

    Raises:
        RunFolderError: the folder holds no run.
    """
    record = read_record(folder)
    alive = is_alive(record)
    console.print(f"[bold]{escape(record.name)}[/]  {escape(str(folder))}")
    console.print(f"  {_state(record, alive=alive)}")
    return 0 if record.state == "completed" or (record.state == "running" and alive) else 1


def _state(record: RunRecord, *, alive: bool) -> str:
    if record.ended_at is not None:
        return f"{record.state} after {duration(record.ended_at - record.started_at)}, exit code {record.exit_code}"
    since = duration(time.time() - record.started_at)
    if alive:
        return f"running for {since}, process {record.pid}"
    return f"vanished: process {record.pid} ended without a word (killed, or the machine went down); began {since} ago"


def duration(seconds: float) -> str:
    """``3725`` as ``1 h 2 min 5 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"
