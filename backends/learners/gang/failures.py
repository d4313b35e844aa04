"""A rank's error as it is told to the process that started it."""

from __future__ import annotations

import errno

from penstock.backends.learners.gang.gang import is_peer_lost
from penstock.backends.learners.gang.words import FailureKind, RankFailed

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def failure_of(error: BaseException) -> RankFailed:
    """What kind of failure it is, and what it says."""
    return RankFailed(kind=_kind_of(error), name=type(error).__name__, message=str(error).strip())


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return FailureKind.DISK_FULL
    # Errors that are the user's to mend are subclasses of ValueError of our own; elsewhere a ValueError is a bug.
    if isinstance(error, ValueError) and type(error).__module__.startswith("penstock."):
        return FailureKind.USERS
    return FailureKind.PEER_LOST if is_peer_lost(error) else FailureKind.CRASH
