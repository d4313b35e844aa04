"""What the folder of a checkpoint is called."""

from __future__ import annotations

import re
from typing import Final

CHECKPOINTS: Final = "checkpoints"
"""Folder of checkpoints within a run's folder."""
CHECKPOINT: Final = re.compile(r"version-(?P<version>\d+)(-e(?P<epoch>\d+))?")
"""Version, and epoch of the incarnation of the learner that wrote it where that is not the first."""


def version_of(name: str) -> int | None:
    """The version of a checkpoint by the name of its folder; None where it is called otherwise."""
    match = CHECKPOINT.fullmatch(name)
    return int(match["version"]) if match else None
