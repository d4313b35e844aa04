"""A rank's error as it is told to the process that started it."""

from __future__ import annotations

from penstock.backends.learners.worker_group.words import FailureKind, RankFailed
from penstock.backends.learners.worker_group.workers import is_peer_lost
from penstock.messages.errors import DivergedError, UserFault, is_disk_full


def failure_of(error: BaseException) -> RankFailed:
    """What kind of failure it is, and what it says."""
    return RankFailed(kind=_kind_of(error), name=type(error).__name__, message=str(error).strip())


def _kind_of(error: BaseException) -> FailureKind:
    if is_disk_full(error):
        return FailureKind.DISK_FULL
    if isinstance(error, UserFault):
        return FailureKind.DIVERGED if isinstance(error, DivergedError) else FailureKind.USERS
    return FailureKind.PEER_LOST if is_peer_lost(error) else FailureKind.CRASH
