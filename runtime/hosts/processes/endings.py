"""Actors that share devices with others are given up when nothing of them is left, and not before.

Whoever hears that such an actor is lost takes its devices for free: the Learner wakes when the last engine there that
has not yielded is lost, and a successor opens where its predecessor was.

Invariants:

* Of an actor that shares devices its process, and all that it has started, is killed first. It is announced as lost,
  and followed, when that has ended; until then it counts as one that lives.
* Where something of it cannot be ended, nobody is told that its devices are free: the run fails.
* Of anybody else nothing is waited for.

| waits for | who ends it |
|---|---|
| the end of an actor's processes, on each machine | the kernel; else ``TIMEOUT_S``, then the run fails |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future

    from penstock.runtime.hosts.processes.incarnations import Incarnation
    from penstock.runtime.hosts.processes.ports import Launcher

END_TIMEOUT_S: Final = 60.0
"""For a machine to end them."""
TIMEOUT_S: Final = END_TIMEOUT_S + 10.0
"""By then it has said whether it has."""


class _Ending(NamedTuple):
    epoch: int
    futures: Sequence[Future[list[int]]]
    then: Callable[[float], None]
    deadline_s: float


class Endings:
    """Those that are being ended, for the supervisor."""

    def __init__(self, shares_devices: Collection[str], launcher: Launcher, fail: Callable[[str], None]) -> None:
        """
        Args:
            shares_devices: the actors that share devices with others.
            launcher: ends processes.
            fail: ends the run with this story.
        """
        self._shares_devices, self._launcher, self._fail = frozenset(shares_devices), launcher, fail
        self._open: dict[str, _Ending] = {}

    def __contains__(self, name: object) -> bool:
        """Whether an actor of this name is being ended."""
        return name in self._open

    def end(self, incarnation: Incarnation, now_s: float, then: Callable[[float], None]) -> None:
        """End an incarnation that shares devices, and go on ``then``; with any other go on at once. One that is being
        ended goes on as was said first."""
        name, process = incarnation.name, incarnation.process
        if name in self._open:
            return
        if name not in self._shares_devices or process is None:  # who has not announced itself holds nothing
            then(now_s)
            return
        futures = self._launcher.end_whole(name, process)
        self._open[name] = _Ending(incarnation.epoch, futures, then, now_s + TIMEOUT_S)

    def forgive(self, now_s: float) -> None:
        """The supervisor itself was asleep."""
        self._open = {name: each._replace(deadline_s=now_s + TIMEOUT_S) for name, each in self._open.items()}

    def look(self, now_s: float) -> None:
        """Go on where all has ended; several times a second."""
        for name, ending in list(self._open.items()):
            told = [pid for future in ending.futures if future.done() for pid in future.result()]
            if told or now_s >= ending.deadline_s:
                which = f"processes {sorted(told)}" if told else "what it has started on a machine that does not answer"
                self._fail(
                    f"{name} {ending.epoch} was to end, and {which} could not be ended within {END_TIMEOUT_S:g} s: the "
                    "devices that it shares with others may be taken still. See to that, then resume the run"
                )
            elif all(future.done() for future in ending.futures):
                del self._open[name]
                ending.then(now_s)
