"""``penstock list``: the runs below a folder, newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from penstock.messages.errors import UserFault
from penstock.runtime.cli.status import duration
from penstock.runtime.launch.runs import RECORD_NAME
from penstock.runtime.launch.status import run_status
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.launch.status import RunStatus

COLUMNS = ("run", "state", "began", "took", "step", "reward")


def show_runs(parent: Path, console: Console) -> int:
    """Print a line for each run of which this folder is the parent; what cannot be read says why in its place.

    Returns:
        0, and 1 where no run is there.
    """
    found = [(file.parent, _status(file.parent)) for file in parent.glob(f"*/{RECORD_NAME}")]
    if not found:
        console.print(f"{escape(terminal_lines(str(parent)))}: no run is there")
        return 1
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[:2]:
        column.overflow = "fold"
    for folder, status in sorted(found, key=_began_at, reverse=True):
        cells = [folder.name, status] if isinstance(status, str) else _cells(folder, status)
        table.add_row(*(escape(terminal_lines(cell)) for cell in cells))
    console.print(table)
    return 0


def _began_at(found: tuple[Path, RunStatus | str]) -> float:
    status = found[1]
    return 0.0 if isinstance(status, str) else status.began_at


def _status(folder: Path) -> RunStatus | str:
    try:
        return run_status(folder)
    except UserFault as error:
        return str(error)


def _cells(folder: Path, status: RunStatus) -> list[str]:
    ended_at = time.time() if status.state == "running" else status.ended_at
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.began_at))
    took = "" if ended_at is None else duration(ended_at - status.began_at)
    step = "none yet" if status.num_steps is None else f"{status.version} of {status.num_steps}"
    reward = "" if status.reward is None else f"{status.reward:.3f}"
    return [folder.name, status.state, began, took, step, reward]
