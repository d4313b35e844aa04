"""Says which files of the runs have changed: one task looks, every client is told.

Invariants:

* Files are looked at by :meth:`Watch.look` alone, at most every ``interval_s``, however many clients there are, and not
  at all where there are none. Nothing is read, and nothing in the folders changes.
* What a client was not told yet is kept as a set of names, which has a bound.

| waits for | who ends it |
|---|---|
| a client, for a change | the next look that finds one; its own deadline |
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.dashboard.answers import stamp
from penstock.runtime.launch.runs import RECORD_NAME, read_record
from penstock.runtime.launch.status import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INTERVAL_S: Final = 0.5
MAX_CLIENTS: Final = 16


class Change(msgspec.Struct, frozen=True):
    """Files of one run that have changed."""

    run: int
    files: tuple[str, ...]


class Client:
    """One page that listens."""

    def __init__(self) -> None:
        self._changed: set[tuple[int, str]] = set()
        self._is_told = asyncio.Event()

    def tell(self, changed: set[tuple[int, str]]) -> None:
        """These have changed."""
        self._changed |= changed
        self._is_told.set()

    async def changes(self, limit_s: float) -> list[Change]:
        """What has changed since the last call; nothing, when nothing does within this time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._is_told.wait()
        except TimeoutError:
            return []
        self._is_told.clear()
        changed, self._changed = self._changed, set()
        runs = sorted({run for run, _ in changed})
        return [Change(run, tuple(sorted(name for of, name in changed if of == run))) for run in runs]


class Watch:
    """The owner of all looking."""

    def __init__(self, folders: Sequence[Path], names: Sequence[str], *, interval_s: float = INTERVAL_S) -> None:
        self.clients: set[Client] = set()
        self._folders = folders
        self._names = names
        self._interval_s = interval_s
        self._seen: dict[tuple[int, str], object] = self._now()

    async def run(self) -> None:
        """Look until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            if not self.clients:  # the first one that comes is told all that has changed since somebody listened
                continue
            changed = await asyncio.to_thread(self.look)
            for client in self.clients if changed else ():
                client.tell(changed)

    def look(self) -> set[tuple[int, str]]:
        """Run and name of what has changed since the last look."""
        now = self._now()
        changed = {key for key in now.keys() | self._seen.keys() if now.get(key) != self._seen.get(key)}
        self._seen = now
        return changed

    def _now(self) -> dict[tuple[int, str], object]:
        seen: dict[tuple[int, str], object] = {}
        for run, folder in enumerate(self._folders):
            for name in self._names:
                seen[run, name] = stamp(folder / name)
            try:
                # A process that was killed changes no file.
                seen[run, RECORD_NAME] = (seen.get((run, RECORD_NAME)), state_of(folder, read_record(folder)))
            except UserFault:
                continue
        return seen
