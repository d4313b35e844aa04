"""Stops of a run by whoever has started it, and who resumes it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.names import BUFFER
from penstock.messages.training import StopAsked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.hosts.virtual.host import Ending, VirtualHost

REASON: Final = "it was asked to stop"
REPEAT_S: Final = 5.0
"""A Buffer that takes the place of another has not heard of it."""


class Stops:
    """Asks for them, and resumes."""

    def __init__(self, times_s: Sequence[float], host: VirtualHost) -> None:
        self._host = host
        self._is_wanted = False
        self.num_stops = 0
        for at_s in times_s:
            host.clock.at(at_s, Stops._ask, self, None)

    def _ask(self, _: None) -> None:
        if not self._is_wanted:
            self._is_wanted = True
            self._say(None)

    def _say(self, _: None) -> None:
        if self._is_wanted:
            self._host.say(BUFFER, StopAsked(reason=REASON))
            self._host.clock.at(self._host.clock.now_s + REPEAT_S, Stops._say, self, None)

    def resumes(self, ending: Ending) -> bool:
        """Whether the run has ended because of a stop; then it goes on, in new processes."""
        self._is_wanted = False
        if ending.completed or ending.story != REASON:
            return False
        self.num_stops += 1
        self._host.ending = None
        self._host.lose_machine()
        return True
