"""Who is alive, as one actor knows it.

Invariants:

* Fences and members are two variables. A fence says which epochs may no longer speak; a member is who speaks now.
* A fence never goes down. No member is below its fence.
* ``returned(e)`` implies the loss of every incarnation below ``e``, whatever order the news come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.membership import ActorEpoch, ActorLost, ActorReturned, EngineJoined, EngineLeaving, EngineLost
from penstock.messages.names import is_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event


class Membership:
    """Members and fences. Every change returns the events that it means, in order."""

    __slots__ = ("_fences", "_leaving", "_members", "epoch_of")

    def __init__(self) -> None:
        self._members: dict[str, int] = {}
        self._fences: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self.epoch_of: Final[Callable[[str], int | None]] = self._members.get
        """The live incarnation of this name, if there is one. Asked for each event, so looking it up runs no Python."""

    def members(self) -> tuple[ActorEpoch, ...]:
        """Every live incarnation."""
        return tuple(ActorEpoch(name, epoch) for name, epoch in self._members.items())

    def lost_members(self) -> tuple[ActorEpoch, ...]:
        """The newest incarnation of each name that may no longer speak."""
        return tuple(ActorEpoch(name, fence - 1) for name, fence in self._fences.items() if fence)

    def admits(self, name: str, epoch: int) -> bool:
        """Whether this incarnation may speak."""
        return epoch >= self._fences.get(name, 0)

    def lost(self, name: str, epoch: int) -> list[Event]:
        """This incarnation, and every earlier one, is given up from now on."""
        self._fences[name] = max(self._fences.get(name, 0), epoch + 1)
        member = self._members.get(name)
        if member is None or member > epoch:
            return []
        del self._members[name]
        return [_lost(name, member)]

    def leaves(self, name: str, epoch: int) -> list[Event]:
        """This incarnation is to leave, and stays a member until it is lost. Nothing if that is known."""
        if self._members.get(name) != epoch or self._leaving.get(name) == epoch:
            return []
        self._leaving[name] = epoch
        return [EngineLeaving(name=name, epoch=epoch)]

    def returned(self, name: str, epoch: int) -> list[Event]:
        """This incarnation is there, so every earlier one is not."""
        member = self._members.get(name)
        if not self.admits(name, epoch) or (member is not None and member >= epoch):
            return []
        events = [] if member is None else [_lost(name, member)]
        self._fences[name] = max(self._fences.get(name, 0), epoch)
        self._members[name] = epoch
        return [
            *events,
            EngineJoined(name=name, epoch=epoch) if is_engine(name) else ActorReturned(name=name, epoch=epoch),
        ]

    def note(self, event: Event, *, own_name: str) -> bool:
        """Know what a recorded event of :meth:`lost`, :meth:`leaves` or :meth:`returned` says, without its events.

        Returns:
            Whether it says that the actor of ``own_name`` is to leave.
        """
        match event:
            case ActorLost() | EngineLost():
                self.lost(event.name, event.epoch)
            case ActorReturned() | EngineJoined():
                self.returned(event.name, event.epoch)
            case EngineLeaving(name=name) if name == own_name:
                return True
            case EngineLeaving():
                self.leaves(event.name, event.epoch)
            case _:
                pass
        return False

    def validate(self) -> None:
        """Assert the invariants."""
        for name, epoch in self._members.items():
            assert epoch >= self._fences.get(name, 0), f"{name} {epoch} speaks below its fence"


def _lost(name: str, epoch: int) -> Event:
    return EngineLost(name=name, epoch=epoch) if is_engine(name) else ActorLost(name=name, epoch=epoch)
