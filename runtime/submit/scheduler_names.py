"""Names that the command line knows before anything else is imported."""

from __future__ import annotations

from enum import StrEnum


class Scheduler(StrEnum):
    """Who is given a run."""

    SLURM = "slurm"
    RAYJOB = "rayjob"
    SKYPILOT = "skypilot"


class JobAction(StrEnum):
    """What is wanted of a run that is submitted."""

    SUBMIT = "submit"
    STATUS = "status"
    LOG = "log"
    STOP = "stop"
    NEW = "new"
