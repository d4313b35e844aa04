"""Engines that are to leave: they get nothing more, and go when nothing is left with them alone.

Invariants:

* An engine is let go only after a census that was taken when none of its leases was ISSUED any more, and in which
  nobody but it lacked what it had passed on: what is on its way to the Scorer is nowhere else.
* What was found with it alone is looked for again; the supervisor waits for so long as it was told, and then takes the
  engine anyway.

| waits for | who ends it |
|---|---|
| what a leaver has to hand back | the leaver; the supervisor, when its time is up |
| what it has passed on to reach the Scorer | the leaver, which repeats it; the same |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.commands import Send, StartTimer
from penstock.messages.membership import EngineEmptied, LeaseStage
from penstock.messages.names import SUPERVISOR

if TYPE_CHECKING:
    from penstock.actors.prompt_source.census import Found
    from penstock.actors.prompt_source.leases import LeaseTable
    from penstock.actors.settled import KnownSettled
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import SampleKey

LEAVING_TIMER: Final = "leaving"
LOOK_AGAIN_S: Final = 0.5
"""From one census in which a leaver alone had something to the next."""


class _Leaver(msgspec.Struct):
    epoch: int
    is_asked: bool = False
    """A census is to tell: nothing is ISSUED to it."""
    rests: bool = False
    """The next one is not due yet, or it is free to go."""


class Leaving:
    """Those of the engines that are there."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._leavers: dict[str, _Leaver] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._leavers

    def begin(self, name: str, epoch: int) -> None:
        """It is to leave; nothing if this incarnation is not there."""
        view = self._table.router.engines.get(name)
        if view is not None and view.epoch == epoch:
            self._leavers[name] = _Leaver(epoch)
            self._table.retire_engine(name)

    def gone(self, name: str) -> bool:
        """It is there no more; whether it was to leave."""
        return self._leavers.pop(name, None) is not None

    def wants_census(self) -> bool:
        """Whether a leaver has nothing ISSUED to it, and no census has been taken since."""
        wanted = False
        for name, leaver in self._leavers.items():
            if self._table.router.engines[name].load:
                leaver.is_asked = False
            elif not leaver.is_asked and not leaver.rests:
                leaver.is_asked = wanted = True
        return wanted

    def look_again(self) -> None:
        """Some time has gone by."""
        for leaver in self._leavers.values():
            leaver.rests = False

    def judged(self, held: dict[SampleKey, Found], settled: KnownSettled) -> list[AnyCommand]:
        """A census was taken: let go who has nothing, and look at the others again later."""
        out: list[AnyCommand] = []
        for name, leaver in self._leavers.items():
            if not leaver.is_asked or self._table.router.engines[name].load:
                continue
            leaver.is_asked, leaver.rests = False, True
            if any(self._is_alone(name, key, held[key]) for key in held if key.group_id not in settled):
                out.append(StartTimer(LEAVING_TIMER, LOOK_AGAIN_S))
            else:
                out.append(Send(SUPERVISOR, EngineEmptied(engine=name, engine_epoch=leaver.epoch)))
        return out

    def _is_alone(self, name: str, key: SampleKey, found: Found) -> bool:
        """Whether it alone has this sample: finished, or its tokens, of which a PromptSource that is new has no lease
        yet."""
        holder, lease = found
        is_unknown = lease.stage is LeaseStage.HANDED_BACK and self._table.lease(key) is None
        return holder == name and (lease.stage is LeaseStage.PASSED_ON or is_unknown)
