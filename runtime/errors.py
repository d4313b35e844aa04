"""Errors that are the user's to mend: the command line prints their message alone and exits with code 2.

Each message is one fact with its place: what is wrong, what was found, what is allowed, what to do.
All of them survive pickling, so that they may cross a process boundary.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user gave cannot be used. The message says what to change."""


class ScenarioError(UserError):
    """A scenario, or an override on the command line, that cannot be run."""


class PreflightError(UserError):
    """Something that the scenario needs is missing on this machine: a file, a port, memory, a package."""


class RunFolderError(UserError):
    """A folder that was given as that of a run is none, or belongs to a run in the wrong state."""
