"""Who can be reached where, and who is given up: what the supervisor knows and tells.

Invariants:

* Epochs and fences of a name only rise. A member is above the fence of its name.
* Every change has a number. A process that has taken over number ``n`` without a gap knows everything up to ``n``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.membership import ActorEpoch
from penstock.runtime.hosts.processes.control import DirectoryChanged

if TYPE_CHECKING:
    from penstock.runtime.hosts.processes.control import Address


class Directory:
    """The supervisor's copy. Each change returns what is to be announced to everyone."""

    def __init__(self) -> None:
        self._members: dict[str, Address] = {}
        self._fences: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self.sequence = 0

    def add(self, address: Address) -> DirectoryChanged | None:
        """An incarnation can be reached; None when it is given up or known already."""
        known = self._members.get(address.name)
        if not self.admits(address.name, address.epoch) or (known is not None and known.epoch >= address.epoch):
            return None
        self._members[address.name] = address
        self.sequence += 1
        return DirectoryChanged(sequence=self.sequence, is_whole=False, members=(address,))

    def give_up(self, name: str, epoch: int) -> DirectoryChanged:
        """This incarnation, and every earlier one, counts no more."""
        self._leaving.pop(name, None)
        self._fences[name] = max(epoch, self._fences.get(name, -1))
        known = self._members.get(name)
        if known is not None and known.epoch <= epoch:
            del self._members[name]
        self.sequence += 1
        fence = ActorEpoch(name, self._fences[name])
        return DirectoryChanged(sequence=self.sequence, is_whole=False, fences=(fence,))

    def leave(self, name: str, epoch: int) -> DirectoryChanged:
        """This member is to leave; it stays one until it is given up."""
        self._leaving[name] = epoch
        self.sequence += 1
        return DirectoryChanged(sequence=self.sequence, is_whole=False, leaving=(ActorEpoch(name, epoch),))

    def next_epoch(self, name: str, first_epoch: int) -> int:
        """Of an incarnation that is to be started; its predecessor, if there was one, is given up."""
        return max(first_epoch, self._fences.get(name, -1) + 1)

    def admits(self, name: str, epoch: int) -> bool:
        """Whether this incarnation counts."""
        return epoch > self._fences.get(name, -1)

    def whole(self) -> DirectoryChanged:
        """Everything, for a process that knows nothing or missed a change."""
        return DirectoryChanged(
            sequence=self.sequence,
            is_whole=True,
            members=tuple(self._members.values()),
            fences=tuple(ActorEpoch(name, epoch) for name, epoch in self._fences.items()),
            leaving=tuple(ActorEpoch(name, epoch) for name, epoch in self._leaving.items()),
        )

    def members(self) -> tuple[Address, ...]:
        """Everyone who can be reached."""
        return tuple(self._members.values())
