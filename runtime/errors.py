"""Errors that are the user's to mend: the command line prints their message alone and exits with code 2.

Each message is one fact with its place: what is wrong, what was found, what is allowed, what to do.
All of them survive pickling, so that they may cross a process boundary.
"""

from __future__ import annotations

import errno


class UserError(ValueError):
    """Something that the user gave cannot be used. The message says what to change."""


class ScenarioError(UserError):
    """A scenario, or an override on the command line, that cannot be run."""


class PreflightError(UserError):
    """Something that the scenario needs is missing on this machine: a file, a port, memory, a package."""


class RunFolderError(UserError):
    """A folder that was given as that of a run is none, or belongs to a run in the wrong state."""


def first_line(error: BaseException) -> str:
    """What a foreign error says, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether something could not be written because there is no room, or no more than the user's quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


DISK_FULL_STORY = "the disk is full, and nothing is acknowledged that cannot be written; make room, then resume the run"
