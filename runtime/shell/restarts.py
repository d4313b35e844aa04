"""When an actor that is silent counts as lost, and what follows: how soon it is replaced, and how often.

Pure: time comes in as an argument.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


WINDOW_S: Final = 600.0
FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 30.0
PATIENCE_SHARE: Final = 0.1
"""Of what a replacement costs: so much more is lost at most where the silence turns out to be a death."""
MAX_PATIENCE_S: Final = 60.0
"""What was generated there goes on elsewhere only after it."""


def patience_s(usual_s: float, start_s: float | None) -> float:
    """How long an actor may be silent before it is given up.

    Args:
        usual_s: what any actor is given.
        start_s: from the order to start it until it had loaded what it has to, as another one would; None: it has not,
            or loads nothing.
    """
    return usual_s if start_s is None else max(usual_s, min(MAX_PATIENCE_S, PATIENCE_SHARE * start_s))


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

    def limit_story(self, name: str, cause: str) -> str:
        """Why the run ends, or goes on without it, when this actor was lost too often, the last time for this cause."""
        return (
            f"{name} was lost {self.max_restarts + 1} times within {self.window_s / 60:.0f} minutes, the last time "
            f"because of this: {cause}. The limit is runtime.max_restarts = {self.max_restarts}"
        )

    def forget(self, name: str) -> None:
        """What this actor lost so far counts no more towards the limit."""
        self._recent.pop(name, None)

    @property
    def totals(self) -> Mapping[str, int]:
        """Restarts of each actor since the start of the run."""
        return self._totals
