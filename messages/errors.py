"""Whose an error is, said by its type. Nothing else asks.

Invariants:

* A :class:`UserFault` is the user's to mend: nothing is replaced or tried again, the command line prints its message
  alone and exits with code 2. Whatever else leaves an actor is ours or the machine's, and the actor is replaced.
* Its message is one fact with its place: what is wrong, what was found, what is allowed, what to do.
* It survives pickling, so that it may cross a process boundary.
"""

from __future__ import annotations

import errno


class UserFault(ValueError):  # noqa: N818 - it says whose the error is
    """Something of the user's cannot be used: a scenario, a row, a function, a checkpoint, a folder, or this machine as
    it is. The message says what to change. Subclasses are for those who catch or count one kind of it."""


class DivergedError(UserFault):
    """The training has diverged: its loss, its gradient or its policy is beyond all bounds, and with the same batches
    and options would be again."""


class RunFailedError(RuntimeError):
    """A run has failed, and not by a mistake of the user's. The message has its story, and what is left of it."""

    def __init__(self, message: str, folder: str) -> None:
        super().__init__(message, folder)
        self.folder = folder
        """Of the run."""

    def __str__(self) -> str:
        return str(self.args[0])


def first_line(error: BaseException) -> str:
    """What a foreign error says, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether something could not be written because there is no room, or no more than the user's quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


DISK_FULL_STORY = "the disk is full, and nothing is acknowledged that cannot be written; make room, then resume the run"
