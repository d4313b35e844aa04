"""What the Learner's process knows of a further node of its worker group, and of the ranks there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.learners.worker_group.rank_view import TOLD_LINES, RankView
from penstock.backends.learners.worker_group.words import FailureKind

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.node_line import NodeLine
    from penstock.backends.learners.worker_group.node_words import NodeFailed, RankShown
    from penstock.backends.processes.remote_ranks import RankEnded


class LostNode(NamedTuple):
    """What has become of a node."""

    story: str
    is_users: bool = False
    """The scenario has to be changed; trying again would not help."""
    last_lines: tuple[str, ...] = ()
    """Last lines that its launcher printed."""


class RemoteRank(RankView):
    """A rank of another node."""

    _is_stopped = False

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped and not self.has_ended

    def show(self, shown: RankShown) -> None:
        """Take what its node says of it."""
        self.pid, self.exit_code, self.is_gone = shown.pid, shown.exit_code, shown.is_gone
        self._is_stopped = shown.is_stopped
        self._lines.clear()
        self.keep_lines(shown.lines)


class Node:
    """One of them."""

    def __init__(self, number: int, ranks: list[RemoteRank], line: NodeLine) -> None:
        """It has not come."""
        self.number: Final = number
        self.ranks: Final = ranks
        self.line: Final = line
        self.failure: NodeFailed | None = None
        self.end: RankEnded | None = None
        self.cut = ""
        """Why nothing more is said on its line."""

    @property
    def host(self) -> str:
        """Its address; empty until it has come."""
        return self.line.peer_host

    @property
    def lost(self) -> LostNode | None:
        """What has become of it, where it can no longer take part."""
        if self.failure is not None:
            return LostNode(f"{self}: {self.failure.message}", self.failure.kind is FailureKind.USERS)
        if self.end is not None:
            return LostNode(f"{self} was lost: {self.end.reason}", last_lines=self.end.last_lines[-TOLD_LINES:])
        return LostNode(f"{self} was lost: {self.cut}") if self.cut else None

    def __str__(self) -> str:
        first, last = self.ranks[0].rank, self.ranks[-1].rank
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"node {self.number} ({f'{self.host}, ' if self.host else ''}{ranks})"
