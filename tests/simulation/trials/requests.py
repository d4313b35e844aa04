"""An operator in a trial: says what is drawn at its time, again until it is answered, and looks at what then holds.

Invariants:

* A request is answered, by whichever Buffer is there, unless the run ends first; the next one is said after that. A
  checkpoint that is promised is asked for until it is written.
* Nothing is granted for training between a recorded pause and its recorded end.
* What is accepted is recorded, once; what is refused is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.ledger import GroupsGranted, PauseRecorded, PolicyRecorded
from penstock.messages.names import BUFFER
from penstock.messages.operator import OperatorAnswered, OperatorEvent, PolicyChanged, SaveAsked
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.hosts.virtual.host import VirtualHost
    from penstock.runtime.hosts.virtual.process import Process

REPEAT_S: Final = 1.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator asks, and when."""

    at_s: float
    event: OperatorEvent


class OperatorWatch(IdleWatcher):
    """One operator; see :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self, requests: Sequence[Request], host: VirtualHost) -> None:
        self._host = host
        self._is_paused = False
        self._policies: list[PolicyRecorded] = []
        self._due: list[int] = []
        """Requests whose time has come and that nobody has answered, oldest first."""
        self._promised: list[int] = []
        """Those that are accepted and not done: repeated, whichever Buffer is there."""
        self._is_saying = False
        self.requests = {
            number: msgspec.structs.replace(request.event, request=number)
            for number, request in enumerate(sorted(requests, key=lambda request: request.at_s), start=1)
        }
        self.answers: dict[int, OperatorAnswered] = {}
        """The final ones, by request."""
        for number, request in enumerate(sorted(requests, key=lambda request: request.at_s), start=1):
            host.clock.at(request.at_s, OperatorWatch._comes, self, number)

    def _comes(self, number: int) -> None:
        self._due.append(number)
        if not self._is_saying:
            self._say(None)

    def _say(self, _: None) -> None:
        said = [*self._promised, *self._due[:1]] if self._host.ending is None else []
        self._is_saying = bool(said)
        for number in said:
            self._host.say(BUFFER, self.requests[number])
        if said:
            self._host.clock.at(self._host.clock.now_s + REPEAT_S, OperatorWatch._say, self, None)

    def heard(self, process: Process, event: Event) -> None:
        """What the Buffer answers."""
        if not isinstance(event, OperatorAnswered):
            return
        request = self.requests[event.request]
        assert event.text
        if event.request in self._due:
            self._due.remove(event.request)
        if not event.is_final:
            assert isinstance(request, SaveAsked)
            assert event.accepted
            self._promised = sorted({*self._promised, event.request})
            return
        if event.request in self._promised:
            self._promised.remove(event.request)
            assert event.accepted or "filling" not in event.text, "a Buffer takes back what its predecessor promised"
        assert self.answers.setdefault(event.request, event).accepted == event.accepted
        if isinstance(request, PolicyChanged):
            recorded = PolicyRecorded(
                policy=request.policy,
                max_staleness=request.max_staleness,
                update_mode=request.update_mode,
                on_stale=request.on_stale,
            )
            assert not event.accepted or recorded in self._policies, f"{request} is accepted and not recorded"

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        """What is granted under a pause, and under which policy."""
        for entry in entries:
            match entry:
                case PauseRecorded():
                    assert entry.is_paused != self._is_paused, "a pause is recorded that holds already"
                    self._is_paused = entry.is_paused
                case PolicyRecorded():
                    assert self._policies[-1:] != [entry], "a policy is recorded that holds already"
                    self._policies.append(entry)
                case GroupsGranted():
                    assert not self._is_paused, f"{entry} while new grants are paused"
                    if self._policies:
                        assert entry.max_staleness == self._policies[-1].max_staleness
                case _:
                    pass
