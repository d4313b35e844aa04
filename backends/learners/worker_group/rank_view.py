"""One rank as the launcher sees it, wherever it runs: its log, how far it is, how it ended."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.backends.processes.process_facts import how_it_ended

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from penstock.backends.learners.worker_group.words import RankFailed

KEPT_LINES: Final = 30
TOLD_LINES: Final = 12
_STACK: Final = re.compile(r"frame #\d+|<unknown function>")
"""What torch writes of its C++ frames, which says nothing to anybody and fills every tail."""


class RankView:
    """What is known of a rank."""

    def __init__(self, rank: int, log_path: Path, *, host: str = "") -> None:
        """Nothing is known yet.

        Args:
            rank: its number.
            log_path: on its node.
            host: of its node; empty: that of this process.
        """
        self.rank: Final = rank
        self.log_path: Final = log_path
        self.host = host
        self.pid = 0
        self.exit_code: int | None = None
        """Minus the signal's number when one has ended it."""
        self.is_ready = False
        self.is_gone = False
        """Guardian and all."""
        self.num_done = 0
        """Orders that it has carried out."""
        self.failure: RankFailed | None = None
        self.heard_s = 0.0
        """When it last said anything."""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def has_ended(self) -> bool:
        """Itself, or the guardian, which takes it along."""
        return self.exit_code is not None or self.is_gone

    @property
    def is_stopped(self) -> bool:
        """By a signal (SIGSTOP)."""
        raise NotImplementedError

    @property
    def tail(self) -> tuple[str, ...]:
        """The end of what it has written."""
        return tuple(self._lines)[-TOLD_LINES:]

    def keep_lines(self, lines: Iterable[str]) -> None:
        """Add to what it has written."""
        self._lines.extend(line for line in lines if line.strip() and not _STACK.search(line))

    def ended_how(self) -> str:
        """``rank 1 (process 4711) was killed by SIGKILL``."""
        if self.exit_code is None and self.is_gone:
            return f"{self} went with its guardian"
        return f"{self} {how_it_ended(self.exit_code)}"

    def last_lines(self) -> str:
        """Where its log is, and its end."""
        tail, where = "".join(f"\n    {line}" for line in self.tail), f"{self.log_path}{_on(self.host)}"
        return f"The end of its log, {where}:{tail}" if tail else f"Its log, {where}, is empty"

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (process {self.pid}{_on(self.host)})" if self.pid else _on(self.host))


def _on(host: str) -> str:
    return f" on {host}" if host else ""
