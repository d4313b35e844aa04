"""``penstock list``: the runs below a folder, newest first."""

from __future__ import annotations

import shlex
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
from penstock.runtime.run_folder import RUNS
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.launch.status import RunStatus

COLUMNS = ("run", "state", "began", "took", "step", "reward")


def show_runs(parent: Path, console: Console) -> None:
    """Print a line for each run of which this folder is the parent; what cannot be read says why in its place. Where
    no run is there yet, it says where it looked and how to begin one.

    Raises:
        UserFault: a folder that was named is not there, or is that of a run itself.
    """
    found = [(file.parent, _status(file.parent)) for file in parent.glob(f"*/{RECORD_NAME}")]
    if not found:
        console.print(escape(terminal_lines(_no_runs(parent))), soft_wrap=True)
        return
    known = sorted(found, key=_began_at, reverse=True)
    rows = [_cells(folder, status) for folder, status in known if not isinstance(status, str)]
    for line in _lines([list(COLUMNS), *rows], console):
        console.print(line, soft_wrap=True)
    for folder, status in known:
        if isinstance(status, str):
            console.print(Text(f"{terminal_text(folder.name)}  {terminal_lines(status)}"), soft_wrap=True)


def _no_runs(parent: Path) -> str:
    if (parent / RECORD_NAME).is_file():
        command = shlex.join(("penstock", "status", str(parent)))
        raise UserFault(f"{parent}: the folder of one run; look at it with: {command}")
    if parent != RUNS and not parent.is_dir():
        what = "a file" if parent.exists() else "no such folder"
        raise UserFault(f"{parent}: {what}; name the folder that runs are in, as run.folder does in a scenario")
    command = shlex.join(("penstock", "run", "quickstart", *(() if parent == RUNS else (f"run.folder={parent}",))))
    return f"{parent.absolute()}: no run is there yet; begin one with: {command}"


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
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.began_at))
    took = "" if status.driven_s is None else duration(status.driven_s)
    none = "none yet" if status.state == "running" else "none"  # an evaluation has none
    step = none if status.num_steps is None else f"{status.version} of {status.num_steps}"
    reward = "" if status.reward is None else f"{status.reward:.3f}"
    return [terminal_text(folder.name), status.state, began, took, step, reward]
