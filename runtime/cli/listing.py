"""``penstock list``: the runs below a folder, newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from penstock.runtime.cli.runs import RECORD_NAME, is_alive, read_record
from penstock.runtime.cli.status import duration
from penstock.runtime.errors import RunFolderError
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.jsonl import BadLineError
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.cli.runs import RunRecord

COLUMNS = ("run", "state", "began", "took", "step", "reward")


def show_runs(parent: Path, console: Console) -> int:
    """Print a line for each run of which this folder is the parent; what cannot be read says why in its place.

    Returns:
        0, and 1 where no run is there.
    """
    records = [(file.parent, _record(file.parent)) for file in parent.glob(f"*/{RECORD_NAME}")]
    if not records:
        console.print(f"{escape(terminal_lines(str(parent)))}: no run is there")
        return 1
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[:2]:
        column.overflow = "fold"
    for folder, record in sorted(records, key=_began_at, reverse=True):
        cells = [folder.name, record] if isinstance(record, str) else _cells(folder, record)
        table.add_row(*(escape(terminal_lines(cell)) for cell in cells))
    console.print(table)
    return 0


def _began_at(found: tuple[Path, RunRecord | str]) -> float:
    record = found[1]
    return 0.0 if isinstance(record, str) else record.began_at


def _record(folder: Path) -> RunRecord | str:
    try:
        return read_record(folder)
    except RunFolderError as error:
        return str(error)


def _cells(folder: Path, record: RunRecord) -> list[str]:
    alive = is_alive(record)
    state = "vanished" if record.state == "running" and not alive else record.state
    ended_at = record.ended_at if record.ended_at is not None else time.time() if alive else None
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.began_at))
    took = "" if ended_at is None else duration(ended_at - record.began_at)
    return [folder.name, state, began, took, *_progress(folder)]


def _progress(folder: Path) -> tuple[str, str]:
    """Steps, and the reward of the newest one."""
    try:
        steps = read_steps(folder)
    except BadLineError as error:
        return str(error), ""
    if not steps:
        return "none yet", ""
    reward = steps[-1].metrics.get(REWARD)
    return f"{steps[-1].version} of {steps[-1].num_steps}", "" if reward is None else f"{reward:.3f}"
