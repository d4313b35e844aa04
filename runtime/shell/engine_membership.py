"""Which engines a run is to have, and those that are on their way out: the same for every supervisor.

Invariants:

* Engines are those of the start until the Buffer has said which are recorded; from then on exactly these.
* A leaver leaves once, within ``leave_timeout_s``. One that is wanted again first goes, and comes back as another
  incarnation.
* Only engines that are wanted, and are not on their way out, are replaced when they are lost.

Pure: time comes in as an argument.

| waits for | who ends it |
|---|---|
| a leaver to be empty | PromptSource, which says so; else ``leave_timeout_s`` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.names import is_engine

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class EngineMembership:
    """Of one drive of a run."""

    def __init__(self, leave_timeout_s: float) -> None:
        self.leave_timeout_s = leave_timeout_s
        self._wanted: frozenset[str] | None = None
        self._leavers: dict[str, float] = {}
        """By name: when its time is up."""

    def want(self, engines: Iterable[str]) -> None:
        """The run is to have these."""
        self._wanted = frozenset(engines)

    def is_wanted(self, name: str) -> bool:
        """Whether this actor is to be there."""
        return self._wanted is None or not is_engine(name) or name in self._wanted

    def is_replaced(self, name: str) -> bool:
        """Whether another incarnation takes its place when it is lost."""
        return self.is_wanted(name) and name not in self._leavers

    def is_leaving(self, name: str) -> bool:
        """Whether it is on its way out."""
        return name in self._leavers

    def missing(self, present: Collection[str]) -> list[str]:
        """Those that are wanted and not among these, which are there or about to be."""
        return sorted((self._wanted or frozenset()).difference(present))

    def surplus(self, present: Collection[str]) -> list[str]:
        """Those of these that are not wanted and stay so far."""
        return sorted(name for name in present if not self.is_wanted(name) and name not in self._leavers)

    def leaves(self, name: str, now_s: float) -> None:
        """It has been told to."""
        self._leavers[name] = now_s + self.leave_timeout_s

    def gone(self, name: str) -> None:
        """It has left, or was lost."""
        self._leavers.pop(name, None)

    def late(self, now_s: float) -> list[str]:
        """Leavers whose time is up."""
        return [name for name, due_s in self._leavers.items() if now_s >= due_s]
