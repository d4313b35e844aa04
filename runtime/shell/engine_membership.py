"""Which engines a run is to have, and those that are on their way out: the same for every supervisor.

Invariants:

* Engines are those of the start until the Buffer has said which are recorded; from then on exactly these.
* A leaver leaves once, within ``leave_timeout_s``. One that is wanted again first goes, and comes back as another
  incarnation.
* One whose machine is about to be taken leaves within the notice. Its place is filled again when that has run out, and
  not before: on that machine nothing lasts.
* Only engines that are wanted, and are not on their way out, are replaced when they are lost.
* One that is given up is not started until the Buffer has recorded that the run goes on without it, and then only if
  it is asked for again. No engine is given up when fewer than ``fewest`` of those that are recorded would be left.

Pure: time comes in as an argument.

| waits for | who ends it |
|---|---|
| a leaver to be empty | PromptSource, which says so; else ``leave_timeout_s`` |
| the Buffer to record that one is given up | the Buffer or a later one, told until it has; else the run's end |
"""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING

from penstock.messages.membership import EngineGivenUp
from penstock.messages.names import engine_index, engine_name, is_engine

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from penstock.messages.membership import ActorEpoch


def resized(engines: Iterable[str], num_engines: int, *, but: Collection[str] = ()) -> tuple[str, ...]:
    """So many engines: of these the first, by their numbers, and then the lowest that are free, ``but`` those."""
    present = sorted(engines, key=engine_index)
    free = (name for name in map(engine_name, count()) if name not in present and name not in but)
    kept = present[:num_engines]
    return tuple(sorted([*kept, *islice(free, num_engines - len(kept))], key=engine_index))


class EngineMembership:
    """Of one drive of a run."""

    def __init__(self, leave_timeout_s: float, fewest: int | None = None) -> None:
        """``fewest``: engines that are left at least; None: all are there from the start to the end."""
        self.leave_timeout_s = leave_timeout_s
        self._fewest = fewest
        self._wanted: frozenset[str] | None = None
        self._leavers: dict[str, float] = {}
        """By name: when its time is up."""
        self._taken: dict[str, float] = {}
        """Those whose machine is taken: when it is."""
        self._given_up: dict[str, EngineGivenUp] = {}
        """Those of whom the Buffer has not recorded it yet."""
        self._done_without: frozenset[str] = frozenset()

    def want(self, engines: Iterable[str], given_up: Iterable[ActorEpoch] = ()) -> list[str]:
        """The run is to have these, and has recorded that it did without those incarnations; who of those that were
        given up is recorded now. Between the two an engine may have been asked for again: only the last is heard."""
        self._wanted, heard = frozenset(engines), {one.name: one.epoch for one in given_up}
        recorded = [
            name
            for name, event in self._given_up.items()
            if name not in self._wanted or heard.get(name, -1) >= event.engine_epoch
        ]
        for name in recorded:
            del self._given_up[name]
        self._done_without = self._done_without.union(recorded) - self._wanted
        return recorded

    def is_wanted(self, name: str) -> bool:
        """Whether this actor is to be there."""
        if self._wanted is None or not is_engine(name):
            return True
        return name in self._wanted and name not in self._given_up

    def can_spare(self, name: str) -> bool:
        """Whether enough engines are left without this one. Nobody can say before the first are recorded."""
        if self._fewest is None or self._wanted is None or not is_engine(name):
            return False
        return len(self._wanted - self._given_up.keys() - {name}) >= self._fewest

    def give_up(self, name: str, epoch: int, reason: str) -> bool:
        """It is not started again; False if it cannot be spared."""
        if not self.can_spare(name):
            return False
        self._given_up[name] = EngineGivenUp(engine=name, engine_epoch=epoch, reason=reason)
        return True

    def unrecorded(self) -> list[EngineGivenUp]:
        """What the Buffer is to be told, again and again."""
        return list(self._given_up.values())

    def shortage(self) -> str:
        """Why too few engines are left, where an operator has let others go since one was given up; else empty."""
        if self._fewest is None or self._wanted is None or not self._given_up:
            return ""
        is_short = len(self._wanted - self._given_up.keys()) < self._fewest
        return next(reversed(self._given_up.values())).reason if is_short else ""

    @property
    def done_without(self) -> frozenset[str]:
        """Those that were given up, as is recorded, and that nobody has asked for since."""
        return self._done_without

    def is_replaced(self, name: str) -> bool:
        """Whether another incarnation takes its place when it is lost."""
        return self.is_wanted(name) and name not in self._leavers

    def is_leaving(self, name: str) -> bool:
        """Whether it is on its way out."""
        return name in self._leavers

    def missing(self, present: Collection[str]) -> list[str]:
        """Those that are wanted and not among these, which are there or about to be."""
        return sorted((self._wanted or frozenset()).difference(present, self._given_up))

    def surplus(self, present: Collection[str]) -> list[str]:
        """Those of these that are not wanted and stay so far."""
        return sorted(name for name in present if not self.is_wanted(name) and name not in self._leavers)

    def leaves(self, name: str, now_s: float) -> None:
        """It has been told to."""
        self._leavers[name] = now_s + self.leave_timeout_s

    def noticed(self, name: str, now_s: float, notice_s: float) -> bool:
        """Its machine is taken after so long; whether it has to be told to leave."""
        is_news = name not in self._leavers
        self._taken[name] = now_s + notice_s
        self._leavers[name] = min(now_s + notice_s, self._leavers.get(name, now_s + notice_s))
        return is_news

    def is_taken(self, name: str) -> bool:
        """Whether it is on its way out because its machine is taken."""
        return name in self._taken

    def returns(self) -> list[tuple[str, float]]:
        """Those that are gone with their machines, and wanted: when their places are to be filled again. Said once."""
        gone = {name: at_s for name, at_s in self._taken.items() if name not in self._leavers}
        for name in gone:
            del self._taken[name]
        return [(name, at_s) for name, at_s in gone.items() if self.is_wanted(name)]

    def gone(self, name: str) -> None:
        """It has left, or was lost."""
        self._leavers.pop(name, None)

    def late(self, now_s: float) -> list[str]:
        """Leavers whose time is up."""
        return [name for name, due_s in self._leavers.items() if now_s >= due_s]
