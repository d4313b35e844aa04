"""Whose turn it is on devices that learner and engines share, as the Learner decides it.

Invariants:

* A turn is the Learner's own only when every engine that shares and lives has said that it holds no memory. Who is lost
  is not waited for: of an engine that shares, this is said when nothing of it is left.
* An engine opens or wakes in a turn of the engines only: one that starts meanwhile, known here or not, holds nothing.
* A Learner that takes another's place begins with a turn of its own, whoever had the last one, under a higher number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.commands import ReplaceActor, Send
from penstock.messages.training import DeviceTurned, Holder
from penstock.messages.waits import Wait

if TYPE_CHECKING:
    from penstock.messages.membership import EngineJoined, EngineLost
    from penstock.messages.training import DeviceYielded

TURNS_PER_EPOCH: Final = 1_000_000
"""Numbers of turns go up over incarnations too."""


class Turns:
    """The engines that share devices with the Learner; none where they have devices of their own."""

    def __init__(self, engines: tuple[str, ...], epoch: int) -> None:
        self.holder = Holder.LEARNER
        self.turn = epoch * TURNS_PER_EPOCH
        self._interrupts = False
        self._names = frozenset(engines)
        self._epochs: dict[str, int] = {}
        """Those that live."""
        self._awaited: dict[str, None] = {}
        """Those of them that have not yielded in this turn of the Learner."""

    @property
    def are_taken(self) -> bool:
        """Whether anything is shared at all."""
        return bool(self._names)

    @property
    def has_takers(self) -> bool:
        """Whether any engine that shares them is there."""
        return bool(self._epochs)

    @property
    def is_ours(self) -> bool:
        """It is the Learner's turn, and nobody else holds memory."""
        return self.holder is Holder.LEARNER and not self._awaited

    def ask(self, *, interrupts: bool) -> list[Send]:
        """The Learner wants the devices; when what runs has ended, or was broken off."""
        return [] if self.holder is Holder.LEARNER else self._begin(Holder.LEARNER, interrupts=interrupts)

    def free(self) -> list[Send]:
        """The Learner has given its memory up."""
        return self._begin(Holder.ENGINES)

    def _begin(self, holder: Holder, *, interrupts: bool = False) -> list[Send]:
        self.holder, self._interrupts = holder, interrupts
        self.turn += 1
        self._awaited = dict.fromkeys(self._epochs) if holder is Holder.LEARNER else {}
        return [self._tell(name) for name in self._epochs]

    def _tell(self, name: str) -> Send:
        return Send(name, DeviceTurned(turn=self.turn, holder=self.holder, interrupts=self._interrupts))

    def joined(self, event: EngineJoined) -> list[Send]:
        """A new incarnation is there; it is told whose turn it is."""
        if event.name not in self._names:
            return []
        self._epochs[event.name] = event.epoch
        if self.holder is Holder.LEARNER:
            self._awaited[event.name] = None
        return [self._tell(event.name)]

    def lost(self, event: EngineLost) -> None:
        """An incarnation is gone, with all that it had started, and its memory with it."""
        if self._epochs.get(event.name) == event.epoch:
            del self._epochs[event.name]
            self._awaited.pop(event.name, None)

    def yielded(self, event: DeviceYielded) -> None:
        """An engine has given its memory up."""
        if event.turn == self.turn and self._epochs.get(event.engine) == event.engine_epoch:
            self._awaited.pop(event.engine, None)

    def late(self, timeout_s: float) -> list[ReplaceActor]:
        """The time is over: who has not yielded is replaced."""
        cause = f"it has not given its device to the learner within {timeout_s:g} s"
        return [ReplaceActor(name, self._epochs[name], cause) for name in self._awaited]

    def waits(self) -> list[Wait]:
        """For each engine that has not yielded."""
        return [Wait("yield of", "the device", name, self.turn) for name in self._awaited]

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._awaited.keys() <= self._epochs.keys() <= self._names
        assert self.holder is Holder.LEARNER or not self._awaited
