"""What the supervisor says to the processes of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.names import SUPERVISOR
from penstock.messages.wire import Header, encode_pack

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.messages.base import Event
    from penstock.runtime.hosts.processes.links import Links

SUPERVISOR_EPOCH: Final = 1
_HEADER: Final = Header(SUPERVISOR, SUPERVISOR_EPOCH, 1, 1, 0)  # what it sends needs no repeating


class Announcer:
    """Speaks to one process, or to all of them."""

    def __init__(self, links: Links, crew: Collection[str]) -> None:
        """``crew``: the names of those that are there, as they come and go."""
        self._links, self._crew = links, crew

    def say(self, name: str, event: Event) -> None:
        """To the actor of this name."""
        self._links.send(name, _frame(event))

    def broadcast(self, event: Event, *, but: str = "") -> None:
        """To everyone but the actor of that name."""
        frame = _frame(event)
        for name in self._crew:
            if name != but:
                self._links.send(name, frame)


def _frame(event: Event) -> bytes:
    return encode_pack([(_HEADER, event)])
