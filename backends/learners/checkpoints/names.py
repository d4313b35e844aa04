"""What the folder of a checkpoint is called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

CHECKPOINTS: Final = "checkpoints"
"""Folder of checkpoints within a run's folder."""
CHECKPOINT: Final = re.compile(r"version-(?P<version>\d+)(-e(?P<epoch>\d+))?")
"""Version, and epoch of the incarnation of the learner that wrote it where that is not the first."""


def version_of(name: str) -> int | None:
    """The version of a checkpoint by the name of its folder; None where it is called otherwise."""
    match = CHECKPOINT.fullmatch(name)
    return int(match["version"]) if match else None


def checkpoint_in(checkpoints: Path, recorded: str) -> Path:
    """Where a checkpoint lies that was written to ``recorded``: in the run's own folder of checkpoints if it has one of
    that name, because the run may have been copied or moved since; else where it was written."""
    written_to = Path(recorded)
    own = checkpoints / written_to.name
    return own if version_of(written_to.name) is not None and own.is_dir() else written_to


def is_of_a_run(recorded: str) -> bool:
    """Whether this is the path of a checkpoint in the folder of some run, as the learners of Penstock write them."""
    return version_of(Path(recorded).name) is not None and Path(recorded).parent.name == CHECKPOINTS
