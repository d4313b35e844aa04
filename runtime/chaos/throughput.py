"""How fast a run went, from its files, and when it was back at its speed after a fault.

Pure: all times are seconds on one clock, in order.

The speed is that of generation where engines report progress often enough, otherwise that of steps. It counts as
restored from the first moment on after which a whole window has 80 % of the median that all windows between the first
step and the first fault had. (Before the first step nobody trains, and what generates has the machine to itself.) A
fault that never brings it below that took no time.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE: Final = 0.8
WINDOWS_OF_STEPS: Final = 3
"""A window has at least so many steps, for generation comes in bursts between them."""
MIN_WINDOW_S: Final = 1.0
GRID_S: Final = 0.05
HORIZON_S: Final = 10.0
"""A loss of speed that begins later than this after a fault is not its doing."""


class Throughput:
    """A counter that grew at known moments."""

    def __init__(self, points: Sequence[tuple[float, float]], *, window_s: float) -> None:
        """
        Args:
            points: when it grew, ascending, and by how much.
            window_s: over how long its rate is taken.
        """
        self._times = [at_s for at_s, _ in points]
        self._totals = [0.0]
        for _, amount in points:
            self._totals.append(self._totals[-1] + amount)
        self.window_s = window_s

    def rate(self, start_s: float) -> float:
        """Growth a second over the window that begins here."""
        first = bisect.bisect_left(self._times, start_s)
        last = bisect.bisect_left(self._times, start_s + self.window_s)
        return (self._totals[last] - self._totals[first]) / self.window_s

    def median_rate(self, since_s: float, until_s: float) -> float | None:
        """Median over the windows that begin and end between these moments; None when there is none."""
        rates = sorted(self.rate(start_s) for start_s in _grid(since_s, until_s - self.window_s))
        return rates[len(rates) // 2] if rates else None

    def restored_after_s(self, fault_s: float, usual: float, *, next_s: float = math.inf) -> float | None:
        """How long after a fault the rate was back; None when that was not before the end.

        Args:
            fault_s: when it came.
            usual: the rate before any fault.
            next_s: when the next fault came: a loss of speed that begins later is that one's doing.
        """
        if not self._times:
            return None
        last_s = self._times[-1] - self.window_s
        fallen_s = next(
            (at_s for at_s in _grid(fault_s, min(fault_s + HORIZON_S, next_s, last_s)) if self._is_slow(at_s, usual)),
            None,
        )
        if fallen_s is None:
            return 0.0 if fault_s <= last_s else None
        back_s = next((at_s for at_s in _grid(fallen_s, last_s) if not self._is_slow(at_s, usual)), None)
        return None if back_s is None else back_s - fault_s

    def _is_slow(self, start_s: float, usual: float) -> bool:
        return self.rate(start_s) < SHARE * usual


def window_of(step_s: float) -> float:
    """The window for a run whose steps take so long."""
    return max(MIN_WINDOW_S, WINDOWS_OF_STEPS * step_s)


def _grid(start_s: float, end_s: float) -> list[float]:
    return [start_s + i * GRID_S for i in range(max(0, int((end_s - start_s) / GRID_S) + 1))]
