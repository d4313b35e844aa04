"""``penstock list``: the runs below a folder, newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.markup import escape
from rich.text import Text

from penstock.messages.errors import UserFault
from penstock.runtime.cli.status import duration
from penstock.runtime.cli.tables import aligned
from penstock.runtime.launch.runs import RECORD_NAME
from penstock.runtime.launch.status import run_status
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    known = sorted(found, key=_began_at, reverse=True)
    rows = [_cells(folder, status) for folder, status in known if not isinstance(status, str)]
    for line in _lines([list(COLUMNS), *rows], console):
        console.print(line, soft_wrap=True)
    for folder, status in known:
        if isinstance(status, str):
            console.print(Text(f"{terminal_text(folder.name)}  {terminal_lines(status)}"), soft_wrap=True)
    return 0


def _lines(rows: list[list[str]], console: Console) -> Iterator[Text]:
    """A line for each row; two on a terminal that has no room for that, as a name is whole for whoever copies it."""
    lines = aligned(rows)
    if console.is_terminal and max(map(cell_len, lines)) > console.width:
        details = aligned([row[1:] for row in rows])
        lines = [f"{row[0]}\n  {detail}" for row, detail in zip(rows, details, strict=True)]
    yield Text(lines[0], style="bold")
    yield from map(Text, lines[1:])


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
    none = "none yet" if status.state == "running" else "none"  # an evaluation has none
    step = none if status.num_steps is None else f"{status.version} of {status.num_steps}"
    reward = "" if status.reward is None else f"{status.reward:.3f}"
    return [terminal_text(folder.name), status.state, began, took, step, reward]
