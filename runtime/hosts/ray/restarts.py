"""What follows the loss of an actor: who is replaced, how soon, how often.

Pure: time comes in as an argument.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.messages.names import Role, role_of

if TYPE_CHECKING:
    from collections.abc import Mapping


class AfterLoss(StrEnum):
    """What the supervisor does when it has given an incarnation up."""

    REPLACE = "replace"
    """Another incarnation takes its place; its peers send again what is not settled."""
    STOP = "stop"
    """The run stops with its story: the state of this actor is nowhere else."""


AFTER_LOSS: Final[Mapping[Role, AfterLoss]] = {
    Role.PROMPT_SOURCE: AfterLoss.REPLACE,
    Role.ENGINE_WORKER: AfterLoss.REPLACE,
    Role.SCORER: AfterLoss.REPLACE,
    Role.FILTER: AfterLoss.REPLACE,
    Role.WEIGHT_PUBLISHER: AfterLoss.REPLACE,
    Role.BUFFER: AfterLoss.STOP,
    Role.LEARNER: AfterLoss.STOP,
}

WINDOW_S: Final = 600.0
FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 30.0


def after_loss_of(name: str) -> AfterLoss:
    """What follows the loss of the actor of this name."""
    return AFTER_LOSS[role_of(name)]


class Restarts:
    """When an actor may be started again, and when it has failed too often."""

    def __init__(self, *, max_restarts: int, window_s: float = WINDOW_S) -> None:
        """
        Args:
            max_restarts: of one actor within the window.
            window_s: how long a restart counts.
        """
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._recent: dict[str, deque[float]] = {}
        self._totals: dict[str, int] = {}

    def pause_s(self, name: str, now_s: float) -> float | None:
        """How long to wait before this actor is started again, from now on; None when that was tried too often.

        The first restart in a window happens at once, so that one crash costs no time; each further one waits twice
        as long as the one before.
        """
        recent = self._recent.setdefault(name, deque())
        while recent and recent[0] <= now_s - self.window_s:
            recent.popleft()
        if len(recent) >= self.max_restarts:
            return None
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(recent) - 1)) if recent else 0.0
        recent.append(now_s)
        self._totals[name] = self._totals.get(name, 0) + 1
        return pause_s

    @property
    def totals(self) -> Mapping[str, int]:
        """Restarts of each actor since the start of the run."""
        return self._totals
