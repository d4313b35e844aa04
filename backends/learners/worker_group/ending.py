"""Why a worker group has to end: the errors that tell it, and which of several signs is the cause. Pure.

A rank that dies takes the others out of their exchanges, so what they say about it may arrive before the news of its
death. That is why the launcher listens a moment longer after the first sign.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from penstock.backends.learners.worker_group.words import FailureKind, RankFailed
from penstock.messages.errors import DivergedError, UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.learners.worker_group.rank_view import RankView
    from penstock.backends.learners.worker_group.remote_node import LostNode


class WorkerGroupError(RuntimeError):
    """A rank died, hung, or failed, or a node was lost; all of them have been ended."""


def first_cause(ranks: Sequence[RankView]) -> RankView | None:
    """The rank that has the reason, where one has: it failed by itself, died without a word, or is stopped."""
    culprits = [rank for rank in ranks if rank.failure is not None and rank.failure.kind is not FailureKind.PEER_LOST]
    died = [rank for rank in ranks if rank.failure is None and rank.has_ended]
    stopped = [rank for rank in ranks if rank.is_stopped]
    # Killed by a signal: by somebody else. An exit code of its own may follow from what another rank has said.
    killed = [rank for rank in died if (rank.exit_code or 0) < 0 or rank.is_gone]
    return next(iter([*killed, *culprits, *died, *stopped]), None)


def error_of(ranks: Sequence[RankView], seen: str, lost: LostNode | None = None) -> BaseException:
    """What ``fail`` is told.

    Args:
        ranks: as they are now, before they are ended.
        seen: what was noticed first, where no rank has the reason itself.
        lost: a node that is lost; whatever ranks elsewhere say is a consequence then.
    """
    if lost is not None:
        if lost.is_users:
            return UserFault(lost.story)
        tail = "".join(f"\n    {line}" for line in lost.last_lines)
        said = f". The end of what its launcher wrote:{tail}" if tail else ""
        return WorkerGroupError(f"the learner has lost a node: {lost.story}; the others were ended with it{said}")
    cause = first_cause(ranks)
    if cause is None or cause.failure is None:
        if cause is None:
            told = seen
        elif cause.is_stopped:
            told = f"{cause} is stopped by a signal, and the others wait for it"
        else:
            told = cause.ended_how()
        source = cause or next((rank for rank in ranks if rank.failure is not None), None)
        tail = f". {source.last_lines()}" if source is not None else ""
        return WorkerGroupError(f"the learner has lost a rank: {told}; the others were ended with it{tail}")
    return _raised_again(cause, cause.failure)


def _raised_again(rank: RankView, failure: RankFailed) -> BaseException:
    match failure.kind:
        case FailureKind.USERS:
            return UserFault(failure.message)
        case FailureKind.DIVERGED:
            return DivergedError(failure.message)
        case FailureKind.DISK_FULL:
            return OSError(errno.ENOSPC, failure.message)
        case _:
            return WorkerGroupError(f"{rank} failed: {failure.name}: {failure.message}. {rank.last_lines()}")
