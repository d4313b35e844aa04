"""Whether a run is in the folder that somebody named, before anything of it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.messages.errors import UserFault

RUNS: Final = Path("runs")
"""Where runs are, unless a scenario or a command says otherwise."""


def folder_of_run(path: Path) -> Path:
    """The same, where there may be a run in it.

    Raises:
        UserFault: it is not there, or is a file.
    """
    if path.is_dir():
        return path
    what = "a file, and not a run's folder" if path.exists() else "no such folder"
    raise UserFault(f"{path}: {what}; penstock list shows the runs that are there")


def file_of_run(folder: Path, name: str) -> Path:
    """A file that every run has.

    Raises:
        UserFault: it is not there, so that no run is in this folder.
    """
    path = folder_of_run(folder) / name
    if not path.is_file():
        raise UserFault(f"{folder}: not a run's folder: it has no {name}; penstock list shows the runs that are there")
    return path
