"""What an embedded engine has to tell of its requests, held for some milliseconds so that several are told at once.

Each time an engine tells something, its actor, the Scorer, the Filter, PromptSource and the Buffer wake, and to wake
costs them more than one more answer does. On a CPU they take that from the engine and the learner: told one by one, the
answers of a small model cost a fifth to a third of all CPU time of a run (``penstock bench utilisation``).

Invariants:

* Nothing is held longer than ``HOLD_S`` while the engine decodes, nor when that stops.
* What few requests wait for is not held: the last ones of a batch, the turn of a single conversation.
* All is told in the order in which it happened.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Emit
    from penstock.messages.local import LocalEvent

HOLD_S: Final = 0.02
"""Since the last time that something was told: some passes of a small model on a CPU."""
RUNNING_TO_HELD: Final = 4
"""So many running requests to each event that is held: with fewer it is a large part of the batch, and told at once."""


class HeldAnswers:
    """Between one decoding thread and its actor; not thread-safe."""

    def __init__(self, emit: Emit, now_s: Callable[[], float] = time.monotonic) -> None:
        """``now_s``: seconds since any moment."""
        self._emit = emit
        self._now_s = now_s
        self._held: list[LocalEvent] = []
        self._told_s = -math.inf

    def hold(self, event: LocalEvent) -> None:
        """Tell it soon."""
        self._held.append(event)

    def tell_due(self, num_running: int) -> None:
        """After a pass. ``num_running``: requests that the engine goes on with, those in its queue too."""
        if not self._held:
            return
        if len(self._held) * RUNNING_TO_HELD >= num_running or self._now_s() - self._told_s >= HOLD_S:
            self.tell()

    def tell(self, *events: LocalEvent) -> None:
        """All that is held, and then ``events``, now."""
        held, self._held = self._held, []
        self._told_s = self._now_s()
        for event in (*held, *events):
            self._emit(event)
